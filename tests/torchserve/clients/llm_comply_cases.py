"""Run llm-comply's cases of one API: FORMAT BASE_URL MODEL. Prints its results as JSON."""

import subprocess
import sys

kind, base_url, model = sys.argv[1:]
command = [sys.executable, "-m", "llm_comply.cli", "-u", base_url, "-k", "any", "-m", model, "--json", "--format", kind]
done = subprocess.run(command, capture_output=True, text=True, timeout=500)
start = done.stdout.find("{")
print(done.stdout[start:].replace("\n", " ") if start >= 0 else done.stderr)
