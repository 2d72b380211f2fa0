"""vLLM's log with the handler's configuration."""

import json
import subprocess
import sys

SHOW_LEVELS = """
import json, logging, os
from handlers.engine.vllm.start import prepare_environment
from tests.vllm.test_model_families import SETTINGS

prepare_environment(SETTINGS, None, os.environ)
from vllm.engine.arg_utils import AsyncEngineArgs
from vllm.logger import configure_logging
from vllm.logging_utils import dump_input

configure_logging(AsyncEngineArgs().create_logging_config())
print(json.dumps([logging.getLogger(name).getEffectiveLevel() for name in ("vllm.v1", dump_input.__name__)]))
"""


def test_vllm_does_not_log_requests() -> None:
    """vLLM logs warnings, but not the images and parameters of a failed step."""
    done = subprocess.run([sys.executable, "-c", SHOW_LEVELS], capture_output=True, text=True, check=True, timeout=120)

    assert json.loads(done.stdout.splitlines()[-1]) == [30, 50]
