"""vLLM as an engine, for GPUs. It needs an environment of its own (`make setup-vllm`, docs/gpu.md)."""
