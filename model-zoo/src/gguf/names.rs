//! GGUF tensor names to Hugging Face's.

/// Divisors of the rotary frequencies, always, in short and in long contexts: part of the spec, not
/// weights.
pub(super) const ROPE_FACTORS: [&str; 3] =
    ["rope_freqs.weight", "rope_factors_short.weight", "rope_factors_long.weight"];
pub(super) const TOKEN_EMBEDDING: &str = "token_embd.weight";
pub(super) const OUTPUT: &str = "output.weight";

const MODEL: &[(&str, &str)] = &[
    (TOKEN_EMBEDDING, crate::weights::EMBED_TOKENS),
    ("output_norm.weight", crate::weights::FINAL_NORM),
    (OUTPUT, crate::weights::LM_HEAD),
];

const LAYER: &[(&str, &str)] = &[
    ("attn_norm.weight", "input_layernorm.weight"),
    ("attn_q.weight", "self_attn.q_proj.weight"),
    ("attn_q.bias", "self_attn.q_proj.bias"),
    ("attn_k.weight", "self_attn.k_proj.weight"),
    ("attn_k.bias", "self_attn.k_proj.bias"),
    ("attn_v.weight", "self_attn.v_proj.weight"),
    ("attn_v.bias", "self_attn.v_proj.bias"),
    ("attn_output.weight", "self_attn.o_proj.weight"),
    ("attn_output.bias", "self_attn.o_proj.bias"),
    ("attn_q_norm.weight", "self_attn.q_norm.weight"),
    ("attn_k_norm.weight", "self_attn.k_norm.weight"),
    ("ffn_norm.weight", "post_attention_layernorm.weight"),
    ("ffn_gate.weight", "mlp.gate_proj.weight"),
    ("ffn_gate.bias", "mlp.gate_proj.bias"),
    ("ffn_up.weight", "mlp.up_proj.weight"),
    ("ffn_up.bias", "mlp.up_proj.bias"),
    ("ffn_down.weight", "mlp.down_proj.weight"),
    ("ffn_down.bias", "mlp.down_proj.bias"),
];

/// A tensor's Hugging Face name; `None` for a name no supported architecture has.
pub(super) fn hugging_face_name(gguf_name: &str) -> Option<String> {
    if let Some((_, name)) = MODEL.iter().find(|(gguf, _)| *gguf == gguf_name) {
        return Some((*name).to_owned());
    }
    let (layer, suffix) = split_layer(gguf_name)?;
    let (_, suffix) = LAYER.iter().find(|(gguf, _)| *gguf == suffix)?;
    Some(crate::weights::layer_weight(layer, suffix))
}

/// `blk.12.attn_q.weight` → `(12, "attn_q.weight")`.
fn split_layer(name: &str) -> Option<(usize, &str)> {
    let (digits, suffix) = name.strip_prefix("blk.")?.split_once('.')?;
    let layer: usize = digits.parse().ok()?;
    // "01" and "+1" parse too, and would be second names for layer 1.
    (layer.to_string() == digits).then_some((layer, suffix))
}

/// Whether a tensor holds query or key rows, which llama files store in another order.
pub(super) fn is_query_or_key(gguf_name: &str) -> bool {
    split_layer(gguf_name).is_some_and(|(_, suffix)| {
        matches!(suffix, "attn_q.weight" | "attn_q.bias" | "attn_k.weight" | "attn_k.bias")
    })
}
