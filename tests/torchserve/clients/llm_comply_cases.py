"""Run the cases of llm-comply for OpenAI's Responses API: BASE_URL MODEL [ID...]. Prints its results as JSON."""

import subprocess
import sys

base_url, model, *ids = sys.argv[1:]
command = [sys.executable, "-m", "llm_comply.cli", "-u", base_url, "-k", "any", "-m", model, "--json"]
done = subprocess.run([*command, *(["-f", ",".join(ids)] if ids else [])], capture_output=True, text=True, timeout=200)
start = done.stdout.find("{")
print(done.stdout[start:].replace("\n", " ") if start >= 0 else done.stderr)
