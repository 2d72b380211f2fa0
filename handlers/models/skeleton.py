"""Models without weights, as a configuration describes them: on torch's meta device, where tensors take no memory."""

import inspect
import threading
from typing import Any

import torch
from transformers import initialization as init

from handlers.errors import SettingsError
from handlers.models.declared_size import BuildLimit, check_buffers

# Held while transformers makes a model: meanwhile it changes torch's default type of floats, and replaces functions of
# torch and of its own, for the whole process.
making_lock = threading.Lock()


def build_skeleton(config: Any, auto: Any, limit: BuildLimit) -> Any:
    """Build the model of this configuration and head without weights.

    auto: transformers' AutoModelFor... of the head. Raises SettingsError if transformers has no such model, or if it
    exceeds the limit; transformers raises others if the configuration is wrong.
    """
    cls = choose_class(config, auto)
    with limit, torch.device("meta"), init.meta_device_safe_creation_ops():
        # Many checkpoints lack a pooler, and no task uses it.
        can_do_without = "add_pooling_layer" in inspect.signature(cls.__init__).parameters
        model = cls(config, add_pooling_layer=False) if can_do_without else cls(config)
    check_buffers(model)
    return model


def choose_class(config: Any, auto: Any) -> Any:
    """Return the class of this configuration and head. Raises SettingsError."""
    try:
        found = auto._model_mapping[type(config)]
    except KeyError as exc:
        raise SettingsError(f"transformers has no {auto.__name__} of type {config.model_type}") from exc
    return found[0] if isinstance(found, tuple) else found
