"""Opens the engine that the settings name."""

from pathlib import Path

from handlers.engine.contract import ChatEngine
from handlers.models.prompt_format import PromptFormat
from handlers.settings.handler import HandlerSettings


def open_engine(settings: HandlerSettings, checkpoint: Path, gpu_id: int | None) -> tuple[PromptFormat, ChatEngine]:
    """Load the checkpoint into the engine. Return the checkpoint's prompt format, and the engine, which is not started.

    gpu_id: the GPU that TorchServe assigned; None for the CPU. Raises SettingsError. Each engine's libraries are
    loaded here, since an environment has those of its own engine only.
    """
    if settings.engine.name == "vllm":
        from handlers.engine.vllm.start import open_vllm

        return open_vllm(settings, checkpoint, gpu_id)
    from handlers.engine.builtin.chat_engine import open_builtin

    return open_builtin(settings, checkpoint, gpu_id)
