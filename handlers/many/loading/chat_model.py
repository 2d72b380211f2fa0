"""A loaded model that generates text: a chat service and an engine for this model alone.

All dialects, streaming and sessions work as in the chat archives, but without a journal; sessions end when the model
leaves memory.
"""

from pathlib import Path
from typing import Any

import torch

from handlers.chat.images.loader import ImageLoader
from handlers.chat.service import ChatService
from handlers.chat.sessions.session_id_minter import SessionIdMinter
from handlers.engine.builtin.chat_engine import make_builtin_engine
from handlers.engine.builtin.kv_cache import cache_shape
from handlers.errors import HandlerError, ModelBroken, NoMemoryForModel, OutOfMemory, Overloaded, SettingsError
from handlers.many.loading.tensor_placement import Assembled, PlacedModel
from handlers.models.loader import load_model, make_text_model
from handlers.models.memory import is_out_of_memory
from handlers.models.text import TextModel
from handlers.models.tokenizer import load_tokenizer
from handlers.models.transformers_check import TransformersCheck
from handlers.requests.incoming import Incoming
from handlers.requests.reply import PendingReply
from handlers.settings.handler import HandlerSettings
from handlers.settings.journal import JournalSettings


class ChatModel(PlacedModel):
    """Implements `handlers.many.model.AnsweringModel`.

    assembled: the decoder; None to load the folder as the chat archives do, for vision models.
    """

    def __init__(
        self,
        folder: Path,
        assembled: Assembled | None,
        device: torch.device,
        settings: HandlerSettings,
        ids: SessionIdMinter,
        intake: ImageLoader,
    ) -> None:
        self._settings = settings.model_copy(update={"journal": JournalSettings()})
        self._ids = ids
        self._intake = intake
        try:
            if assembled is None:
                self._text_model = load_model(folder, device, settings.model.dtype)
                super().__init__(Assembled(self._text_model.model), device)
            else:
                super().__init__(assembled, device)
                self._text_model = _make_text_model(assembled.model, folder)
        except NoMemoryForModel as exc:
            raise OutOfMemory(str(exc)) from exc
        except SettingsError as exc:
            raise ModelBroken(str(exc)) from exc
        self._service: ChatService | None = None
        self._kv_bytes = 0
        try:
            self._begin()
        except Exception:
            super().close()
            raise

    @property
    def device_bytes(self) -> int:
        return super().device_bytes + self._kv_bytes

    @property
    def metadata(self) -> dict[str, Any]:
        return {"versions": ["1"], "platform": "text-generation", "inputs": [], "outputs": []}

    def holds(self, session_id: str) -> bool:
        service = self._service
        return service is not None and service.store.holds(session_id)

    def start(self, incoming: Incoming, reply: PendingReply) -> None:
        service = self._service
        if service is None:
            reply.fail(Overloaded("the model is leaving memory; try again"))
        else:
            service.start(incoming, reply)

    def to_host(self) -> None:
        self._end()
        super().to_host()

    def to_device(self) -> None:
        super().to_device()
        try:
            self._begin()
        except Exception:  # torch's own, too, if the device has no room for a step
            super().to_host()
            raise

    def close(self) -> None:
        self._end()
        super().close()

    def _begin(self) -> None:
        kv_bytes = cache_shape(self._text_model).num_bytes(self._settings.tasks.kv_tokens)
        engine = make_builtin_engine(self._text_model, kv_bytes, self._settings.engine, self._settings.grammar)
        self._service = ChatService(self._settings, self._text_model, engine, self._ids, self._intake)
        self._kv_bytes = engine.pool.storage.nbytes
        engine.start()

    def _end(self) -> None:
        service, self._service = self._service, None
        self._kv_bytes = 0
        if service is not None:
            service.stop()


def _make_text_model(model: Any, folder: Path) -> TextModel:
    """Prepare a model for the engine and compare its results there. Raises SettingsError, ModelBroken.

    The weights are not packed, since packed ones would be private memory instead of page cache.
    """
    try:
        return make_text_model(model, load_tokenizer(folder), TransformersCheck(model))
    except (SettingsError, HandlerError):
        raise
    except Exception as exc:  # each of transformers' families fails in its own way
        if is_out_of_memory(exc):
            raise
        raise ModelBroken(f"the model cannot generate text here: {type(exc).__name__}: {str(exc)[:300]}") from exc
