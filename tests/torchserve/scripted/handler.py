"""The entry file of an archive whose model is scripted; all else is the chat handler's. Exactly one class is here."""

from typing import Any

from handlers.chat_entry import ChatHandler


class ScriptedHandler(ChatHandler):
    """The chat handler with another model behind its engine."""

    def initialize(self, context: Any) -> None:
        from scripted_model import ScriptedModel

        import handlers.engine.builtin.chat_engine

        load = handlers.engine.builtin.chat_engine.load_model
        handlers.engine.builtin.chat_engine.load_model = lambda *given, **options: ScriptedModel(
            load(*given, **options)
        )
        super().initialize(context)
