"""Settings of answers that follow a schema or another grammar: `handler.grammar`."""

from pydantic import Field

from handlers.settings.group import MIB, Count, HandlerGroup, Positive


class GrammarSettings(HandlerGroup, title="grammar"):
    """Schemas, regular expressions and grammars that answers must follow (docs/structured-output.md)."""

    max_chars: Count = Field(65_536, description="Characters of a schema as JSON, a regular expression or a grammar.")
    max_regex_chars: Count = Field(
        4096, description="Characters of a regular expression, for which max_chars counts, too."
    )
    max_symbols: Count = Field(
        100_000, description="Symbols of an expanded grammar; 5,000 values of an enum take 12 ms to compile."
    )
    max_states: Count = Field(
        20_000, description="States of one answer's automaton, about 2 kB each; above it the answer ends with an error."
    )
    max_cpu_s: Positive = Field(
        2.0,
        description="Processor time for one answer's masks, for which other answers wait; above it the answer ends "
        "with an error.",
    )
    max_compile_cpu_s: Positive = Field(
        1.0, description="Processor time to compile a grammar; one that needs more is refused."
    )
    max_compile_bytes: Count = Field(
        64 * MIB, description="Memory to compile a grammar; one that needs more is refused."
    )
    compile_timeout_s: Positive = Field(
        5.0, description="Longest time until a grammar is compiled, including its wait for others."
    )
    max_cached: Count = Field(128, description="Compiled grammars that are cached.")
    max_cached_bytes: Count = Field(256 * MIB, description="Memory of the cached grammars.")
