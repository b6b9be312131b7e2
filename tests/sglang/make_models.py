"""make_models.py FOLDER   Tiny checkpoints: a target whose greedy output is known, and two drafts for it.

``target``: token t is followed by ``next_token(t)``, a cycle over 10..245. ``draft`` (EAGLE) is always right
after tokens 10..127 and always wrong after 128..245. So a prompt's last token sets the acceptance, and every
token of an output can be checked. Both have a tokenizer in which a printable ASCII character is the token of
its code, so that grammars can be tried. ``draft-with-memory`` is a ``draft`` whose every output depends on
the target's hidden states and on the KV cache of all tokens before: what it drafts after a step without
drafts shows whether that step brought both up to date.
"""

import json
import sys
from pathlib import Path

import torch
from safetensors.torch import save_file
from tokenizers import Tokenizer
from tokenizers.models import WordLevel

VOCABULARY, HIDDEN, INTERMEDIATE, LAYERS = 256, 64, 128, 2
FIRST, FIRST_REJECTED, LAST = 10, 128, 245
CONFIG = {
    "model_type": "llama",
    "hidden_size": HIDDEN,
    "intermediate_size": INTERMEDIATE,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "vocab_size": VOCABULARY,
    "max_position_embeddings": 4096,
    "rms_norm_eps": 1e-5,
    "rope_theta": 10000.0,
    "hidden_act": "silu",
    "torch_dtype": "float32",
    "bos_token_id": 1,
    "eos_token_id": 2,
    "tie_word_embeddings": False,
}


def next_token(token):
    return FIRST if token == LAST else (token + 1) % VOCABULARY


def embeddings():
    """Unit vectors by token; the last component marks the tokens after which the draft is wrong."""
    rows = torch.randn(VOCABULARY, HIDDEN)
    rows[:, -1] = 0
    rows /= rows.norm(dim=1, keepdim=True)
    rows[FIRST_REJECTED : LAST + 1, -1] = 1.0
    return rows


def layer(prefix):
    """A layer that runs in full and adds nothing: its output projections are zero."""
    return {
        f"{prefix}self_attn.q_proj.weight": torch.randn(64, HIDDEN) * 0.1,
        f"{prefix}self_attn.k_proj.weight": torch.randn(32, HIDDEN) * 0.1,
        f"{prefix}self_attn.v_proj.weight": torch.randn(32, HIDDEN) * 0.1,
        f"{prefix}self_attn.o_proj.weight": torch.zeros(HIDDEN, 64),
        f"{prefix}mlp.gate_proj.weight": torch.randn(INTERMEDIATE, HIDDEN) * 0.1,
        f"{prefix}mlp.up_proj.weight": torch.randn(INTERMEDIATE, HIDDEN) * 0.1,
        f"{prefix}mlp.down_proj.weight": torch.zeros(HIDDEN, INTERMEDIATE),
        f"{prefix}input_layernorm.weight": torch.ones(HIDDEN),
        f"{prefix}post_attention_layernorm.weight": torch.ones(HIDDEN),
    }


def save_tokenizer(folder):
    words = {"<unk>": 0, "<s>": 1, "</s>": 2}
    printable = range(ord(" "), ord("~") + 1)
    words |= {chr(t) if t in printable else f"<{t}>": t for t in range(len(words), VOCABULARY)}
    Tokenizer(WordLevel(words, unk_token="<unk>")).save(str(folder / "tokenizer.json"))
    special = {"unk_token": "<unk>", "bos_token": "<s>", "eos_token": "</s>"}
    config = {"tokenizer_class": "PreTrainedTokenizerFast", **special}
    (folder / "tokenizer_config.json").write_text(json.dumps(config))


def save(folder, architecture, layers, weights):
    folder.mkdir(parents=True, exist_ok=True)
    config = {**CONFIG, "architectures": [architecture], "num_hidden_layers": layers}
    (folder / "config.json").write_text(json.dumps(config, indent=1))
    tensors = {name: weight.contiguous().clone() for name, weight in weights.items()}
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    save_tokenizer(folder)


def main(folder):
    torch.manual_seed(0)
    embed = embeddings()
    head = torch.zeros(VOCABULARY, HIDDEN)
    for token in range(VOCABULARY):
        head[next_token(token)] = embed[token]
    target = {"model.embed_tokens.weight": embed, "lm_head.weight": head}
    target["model.norm.weight"] = torch.ones(HIDDEN)
    for number in range(LAYERS):
        target |= layer(f"model.layers.{number}.")
    save(folder / "target", "LlamaForCausalLM", LAYERS, target)
    # The draft passes the token's vector on, and where it is marked adds much of token 5's.
    project = torch.zeros(HIDDEN, 2 * HIDDEN)
    project[:, :HIDDEN] = torch.eye(HIDDEN)
    project[:, HIDDEN - 1] += 10 * embed[5]
    draft = layer("layers.0.")
    del draft["layers.0.input_layernorm.weight"]
    draft |= {"embed_tokens.weight": embed, "fc.weight": project, "fc.bias": torch.zeros(HIDDEN)}
    save(folder / "draft", "LlamaForCausalLMEagle", 1, draft)
    remembering = project.clone()
    remembering[:, HIDDEN:] = torch.randn(HIDDEN, HIDDEN) * 0.1
    attention = torch.randn(HIDDEN, 64) * 0.3
    memory = {"fc.weight": remembering, "layers.0.self_attn.o_proj.weight": attention}
    save(folder / "draft-with-memory", "LlamaForCausalLMEagle", 1, draft | memory)


if __name__ == "__main__":
    main(Path(sys.argv[1]))
