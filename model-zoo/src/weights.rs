//! The tensors a spec needs, by name and shape, and the check that a source holds just those.

use crate::{error::LoadError, source::WeightSource, spec::DecoderSpec};

/// The embedding matrix, `[vocab_size, hidden_size]`.
pub const EMBED_TOKENS: &str = "model.embed_tokens.weight";
/// The last norm, `[hidden_size]`.
pub const FINAL_NORM: &str = "model.norm.weight";
/// The output projection, `[vocab_size, hidden_size]`; absent when tied to the embedding.
pub const LM_HEAD: &str = "lm_head.weight";

/// A tensor that a spec needs.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct ExpectedWeight {
    /// Hugging Face name.
    pub name: String,
    /// `[rows, cols]`, or `[len]`.
    pub shape: Vec<usize>,
}

/// The name of a tensor of one layer; `suffix` is such as `self_attn.q_proj.weight`.
pub fn layer_weight(layer: usize, suffix: &str) -> String {
    format!("model.layers.{layer}.{suffix}")
}

/// Every tensor a spec needs: the embedding, then each layer's, then the last norm and, unless
/// tied, the output projection.
pub fn expected_weights(spec: &DecoderSpec) -> Vec<ExpectedWeight> {
    let (vocab, hidden) = (spec.vocab_size, spec.hidden_size);
    let mut weights =
        vec![ExpectedWeight { name: EMBED_TOKENS.into(), shape: vec![vocab, hidden] }];
    for layer in 0..spec.num_layers {
        for (suffix, shape) in layer_shapes(spec) {
            weights.push(ExpectedWeight { name: layer_weight(layer, suffix), shape });
        }
    }
    weights.push(ExpectedWeight { name: FINAL_NORM.into(), shape: vec![hidden] });
    if !spec.tie_word_embeddings {
        weights.push(ExpectedWeight { name: LM_HEAD.into(), shape: vec![vocab, hidden] });
    }
    weights
}

fn layer_shapes(spec: &DecoderSpec) -> Vec<(&'static str, Vec<usize>)> {
    let (hidden, mlp) = (spec.hidden_size, spec.intermediate_size);
    let q = spec.num_heads * spec.head_dim;
    let kv = spec.num_kv_heads * spec.head_dim;
    let mut shapes = vec![
        ("input_layernorm.weight", vec![hidden]),
        ("self_attn.q_proj.weight", vec![q, hidden]),
        ("self_attn.k_proj.weight", vec![kv, hidden]),
        ("self_attn.v_proj.weight", vec![kv, hidden]),
        ("self_attn.o_proj.weight", vec![hidden, q]),
        ("post_attention_layernorm.weight", vec![hidden]),
        ("mlp.gate_proj.weight", vec![mlp, hidden]),
        ("mlp.up_proj.weight", vec![mlp, hidden]),
        ("mlp.down_proj.weight", vec![hidden, mlp]),
    ];
    if spec.qkv_bias {
        shapes.push(("self_attn.q_proj.bias", vec![q]));
        shapes.push(("self_attn.k_proj.bias", vec![kv]));
        shapes.push(("self_attn.v_proj.bias", vec![kv]));
    }
    if spec.o_bias {
        shapes.push(("self_attn.o_proj.bias", vec![hidden]));
    }
    if spec.mlp_bias {
        shapes.push(("mlp.gate_proj.bias", vec![mlp]));
        shapes.push(("mlp.up_proj.bias", vec![mlp]));
        shapes.push(("mlp.down_proj.bias", vec![hidden]));
    }
    if spec.qk_norm {
        shapes.push(("self_attn.q_norm.weight", vec![spec.head_dim]));
        shapes.push(("self_attn.k_norm.weight", vec![spec.head_dim]));
    }
    shapes
}

/// Checks that `source` holds every tensor `spec` needs, in the right shape, and no other. Old
/// checkpoints' rotary buffers are ignored, and so is an `lm_head.weight` beside a tied embedding.
///
/// # Errors
/// The first tensor that is missing, misshapen or unexpected, with its file.
pub fn check_weights(spec: &DecoderSpec, source: &dyn WeightSource) -> Result<(), LoadError> {
    let expected = expected_weights(spec);
    for ExpectedWeight { name, shape } in &expected {
        let error = |problem: String| LoadError::tensor(source.location(name), name, problem);
        match source.shape(name) {
            Some(found) if found == shape => {}
            Some(found) => {
                return Err(error(format!("has shape {found:?}; the config makes it {shape:?}")));
            }
            None if name == LM_HEAD => {
                return Err(error("is missing, and tie_word_embeddings is false".into()));
            }
            None => return Err(error("is missing".into())),
        }
    }
    let expected: std::collections::HashSet<&str> =
        expected.iter().map(|weight| weight.name.as_str()).collect();
    for name in source.names() {
        let is_ignored =
            name.ends_with(".rotary_emb.inv_freq") || (spec.tie_word_embeddings && name == LM_HEAD);
        if !is_ignored && !expected.contains(name) {
            let problem = format!("is not part of {}", spec.architecture);
            return Err(LoadError::tensor(source.location(name), name, problem));
        }
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use std::collections::BTreeMap;

    use super::*;
    use crate::{
        config::golden_folder, config::read_config, safetensors::SafetensorsSource,
        source::SourceDtype,
    };

    /// A source of shapes only.
    struct Shapes(ShapeMap);

    type ShapeMap = BTreeMap<String, Vec<usize>>;

    impl WeightSource for Shapes {
        fn shape(&self, name: &str) -> Option<&[usize]> {
            self.0.get(name).map(Vec::as_slice)
        }
        fn dtype(&self, name: &str) -> Option<SourceDtype> {
            self.0.get(name).map(|_| SourceDtype::F32)
        }
        fn names(&self) -> Vec<&str> {
            self.0.keys().map(String::as_str).collect()
        }
        fn read_row(&self, _: &str, _: usize, _: &mut [f32]) -> Result<(), LoadError> {
            unreachable!("only shapes are checked")
        }
        fn location(&self, _: &str) -> String {
            "shapes".into()
        }
    }

    fn spec_and_shapes(golden: &str) -> (DecoderSpec, Shapes) {
        let spec = read_config(&golden_folder(golden)).unwrap().spec;
        let shapes = expected_weights(&spec).into_iter().map(|w| (w.name, w.shape)).collect();
        (spec, Shapes(shapes))
    }

    #[test]
    fn golden_models_hold_what_their_specs_need() {
        for golden in crate::config::GOLDENS {
            let dir = golden_folder(golden);
            let spec = read_config(&dir).unwrap().spec;
            let source = SafetensorsSource::open(&dir).unwrap();
            check_weights(&spec, &source).unwrap();
            assert_eq!(source.names().len(), expected_weights(&spec).len(), "{golden}");
        }
    }

    #[test]
    fn a49_absent_lm_head_is_an_error_unless_tied() {
        let (mut spec, mut shapes) = spec_and_shapes("llama-gqa");
        shapes.0.remove(LM_HEAD);
        let error = check_weights(&spec, &shapes).unwrap_err().to_string();
        assert!(error.contains("`lm_head.weight`: is missing, and tie_word_embeddings"), "{error}");
        spec.tie_word_embeddings = true;
        check_weights(&spec, &shapes).unwrap();
        shapes.0.insert(LM_HEAD.into(), vec![320, 64]);
        check_weights(&spec, &shapes).unwrap();
    }

    #[test]
    fn missing_misshapen_and_unexpected_tensors_are_named() {
        let (spec, shapes) = spec_and_shapes("qwen2-bias");
        check_weights(&spec, &shapes).unwrap();
        let bias = layer_weight(1, "self_attn.k_proj.bias");
        let error = |change: &dyn Fn(&mut ShapeMap)| {
            let mut changed = Shapes(shapes.0.clone());
            change(&mut changed.0);
            check_weights(&spec, &changed).map_err(|e| e.to_string())
        };
        let missing = error(&|s| drop(s.remove(&bias))).unwrap_err();
        assert!(missing.contains(&bias) && missing.contains("is missing"), "{missing}");
        let misshapen = error(&|s| drop(s.insert(bias.clone(), vec![65]))).unwrap_err();
        assert!(misshapen.contains("[65]") && misshapen.contains("[64]"), "{misshapen}");
        let extra = layer_weight(0, "self_attn.o_proj.bias");
        let unexpected = error(&|s| drop(s.insert(extra.clone(), vec![128]))).unwrap_err();
        assert!(unexpected.contains(&extra), "{unexpected}");
        let rotary = layer_weight(0, "self_attn.rotary_emb.inv_freq");
        error(&|s| drop(s.insert(rotary.clone(), vec![32]))).unwrap();
    }
}
