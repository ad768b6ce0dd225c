"""Stands for vLLM, which SGLang's CPU path takes three functions from; on the path of SGLang's children in tests."""
