"""`torchmoor chat`: parses; what it does is in torchmoor.chat."""

from __future__ import annotations

import click

from torchmoor.chat import ChatOptions, run
from torchmoor.commands.options import DEFAULT_ENDPOINT
from torchmoor.errors import TorchmoorError


@click.command()
@click.argument("image", required=False)
@click.option("--endpoint-url", default="http://127.0.0.1:8080", show_default=True, help="Where the proxy listens.")
@click.option("--endpoint", default=DEFAULT_ENDPOINT, show_default=True, help="The endpoint's name.")
@click.option(
    "--ask", multiple=True, metavar="QUESTION", help="Ask this and end, instead of a conversation. Repeatable."
)
@click.option("--max-new-tokens", type=click.IntRange(min=1), help="The longest answer.")
@click.option("--temperature", type=click.FloatRange(min=0), help="Sample at this temperature; greedy without it.")
@click.option("--json", "as_json", is_flag=True, help="One line of JSON for each answer.")
def chat(
    image: str | None,
    endpoint_url: str,
    endpoint: str,
    ask: tuple[str, ...],
    max_new_tokens: int | None,
    temperature: float | None,
    as_json: bool,
) -> None:
    """Talk about IMAGE, a file or an http(s) address, with streamed answers; without one, about anything.

    In the conversation, /image PATH adds a picture and /quit ends.

    \b
    Examples:
      torchmoor chat picture.png
      torchmoor chat --endpoint llm
      torchmoor chat picture.png --ask "What color is the circle?" --ask "Where is it?"
    """
    parameters = {"max_new_tokens": max_new_tokens, "temperature": temperature}
    options = ChatOptions(
        image=image,
        endpoint_url=endpoint_url,
        endpoint=endpoint,
        questions=ask,
        parameters={name: value for name, value in parameters.items() if value is not None},
        as_json=as_json,
    )
    try:
        run(options)
    except TorchmoorError as error:
        raise click.ClickException(str(error)) from error
