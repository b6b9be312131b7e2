from sglang.srt.models.llama_eagle import LlamaForCausalLMEagle

EntryClass = LlamaForCausalLMEagle
