"""Tiny models of transformers' families, with random weights: 2 layers, 8 experts, hidden size 32."""

from __future__ import annotations

from typing import Any

VOCABULARY = 96
EXPERTS = 8

_COMMON: dict[str, Any] = {
    "vocab_size": VOCABULARY,
    "hidden_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 64,
    "intermediate_size": 48,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
_MLA = {
    "num_key_value_heads": 4,
    "q_lora_rank": 16,
    "kv_lora_rank": 16,
    "qk_rope_head_dim": 8,
    "qk_nope_head_dim": 8,
    "v_head_dim": 16,
}

# Family: (name of the classes without Config and ForCausalLM, what its configuration needs beyond _COMMON).
FAMILIES: dict[str, tuple[str, dict[str, Any]]] = {
    "mixtral": ("Mixtral", {"num_local_experts": 8, "num_experts_per_tok": 2}),
    "qwen2_moe": (
        "Qwen2Moe",
        {
            "num_experts": 8,
            "num_experts_per_tok": 2,
            "moe_intermediate_size": 24,
            "shared_expert_intermediate_size": 24,
        },
    ),
    "qwen3_moe": (
        "Qwen3Moe",
        {"num_experts": 8, "num_experts_per_tok": 4, "moe_intermediate_size": 24, "head_dim": 8},
    ),
    "deepseek_v3": (
        "DeepseekV3",
        {
            **_MLA,
            "n_routed_experts": 8,
            "num_experts_per_tok": 2,
            "n_group": 4,
            "topk_group": 2,
            "n_shared_experts": 1,
            "moe_intermediate_size": 24,
            "first_k_dense_replace": 1,
        },
    ),
    "gpt_oss": (
        "GptOss",
        {
            "num_local_experts": 8,
            "num_experts_per_tok": 2,
            "head_dim": 8,
            "layer_types": ["full_attention", "full_attention"],
        },
    ),
    "olmoe": ("Olmoe", {"num_experts": 8, "num_experts_per_tok": 2}),
    "qwen3_next": (
        "Qwen3Next",
        {
            "num_experts": 8,
            "num_experts_per_tok": 2,
            "moe_intermediate_size": 24,
            "shared_expert_intermediate_size": 24,
            "head_dim": 8,
            "linear_key_head_dim": 8,
            "linear_value_head_dim": 8,
            "linear_num_key_heads": 2,
            "linear_num_value_heads": 4,
            "layer_types": ["linear_attention", "full_attention"],
        },
    ),
    "glm4_moe": (
        "Glm4Moe",
        {
            "n_routed_experts": 8,
            "num_experts_per_tok": 2,
            "moe_intermediate_size": 24,
            "head_dim": 8,
            "first_k_dense_replace": 0,
        },
    ),
    "phimoe": ("Phimoe", {"num_local_experts": 8, "num_experts_per_tok": 2, "router_jitter_noise": 0.3}),
    "granitemoe": ("GraniteMoe", {"num_local_experts": 8, "num_experts_per_tok": 2}),
    "minimax_m2": ("MiniMaxM2", {"num_local_experts": 8, "num_experts_per_tok": 2, "head_dim": 8}),
    "ernie4_5_moe": (
        "Ernie4_5_Moe",
        {
            "moe_num_experts": 8,
            "moe_k": 2,
            "moe_intermediate_size": 24,
            "moe_layer_start_index": 0,
            "moe_num_shared_experts": 1,
        },
    ),
    "hunyuan_v1_moe": ("HunYuanMoEV1", {"num_experts": 8, "moe_topk": 2, "head_dim": 8}),
    "lfm2_moe": (
        "Lfm2Moe",
        {
            "num_experts": 8,
            "num_experts_per_tok": 2,
            "moe_intermediate_size": 24,
            "num_dense_layers": 0,
            "layer_types": ["conv", "full_attention"],
        },
    ),
    "nemotron_h": (
        "NemotronH",
        {
            "n_routed_experts": 8,
            "num_experts_per_tok": 2,
            "moe_intermediate_size": 24,
            "moe_shared_expert_intermediate_size": 24,
            "layers_block_type": ["attention", "moe", "mamba", "moe"],
            "num_hidden_layers": 4,
            "head_dim": 8,
            "mamba_num_heads": 4,
            "mamba_head_dim": 8,
            "ssm_state_size": 8,
            "n_groups": 2,
            "chunk_size": 8,
        },
    ),
    "flex_olmo": ("FlexOlmo", {"num_experts": 8, "num_experts_per_tok": 2}),
}


def make_config(family: str, **changes: Any) -> Any:
    """The family's configuration."""
    import transformers

    name, needs = FAMILIES[family]
    return getattr(transformers, f"{name}Config")(**{**_COMMON, **needs, **changes})


def make_model(family: str, seed: int = 0, **changes: Any) -> Any:
    """The model in float32, the same values for the same seed, and none of them zero as some initialisations are."""
    import torch
    import transformers

    config = make_config(family, **changes)
    torch.manual_seed(seed)
    model = getattr(transformers, f"{FAMILIES[family][0]}ForCausalLM")(
        config
    ).eval()  # Phi draws its experts while it trains
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for name, value in model.named_parameters():
            if "norm" not in name and value.dim() > 0:
                value.copy_(torch.randn(value.shape, generator=generator) * (0.5 / value.shape[-1] ** 0.5))
        for name, value in model.named_buffers():
            if name.endswith("e_score_correction_bias"):
                value.copy_(torch.rand(value.shape, generator=generator) * 4 - 2)
    return model


def make_ids(rank: int, batch: int = 2, length: int = 7) -> Any:
    """[batch, length] token ids of a rank, none of them a special one."""
    import torch

    generator = torch.Generator().manual_seed(100 + rank)
    return torch.randint(3, VOCABULARY, (batch, length), generator=generator)
