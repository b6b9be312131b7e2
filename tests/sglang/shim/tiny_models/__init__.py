"""The tests' models, for SGLANG_EXTERNAL_MODEL_PACKAGE: SGLang then imports no others, which saves 30 s."""
