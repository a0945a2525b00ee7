//! Golden configs, the spellings in the wild, and hostile ones.

use std::{fs, path::PathBuf};

use proptest::prelude::*;
use serde_json::{Value, json};

use super::*;
use crate::{
    source::SourceDtype,
    spec::{RopeScaling, RopeSpec},
};

pub(crate) const GOLDENS: [&str; 6] = [
    "llama-gqa",
    "llama3-rope-tied",
    "mistral-full",
    "mistral-sliding",
    "qwen2-bias",
    "qwen3-qknorm",
];

pub(crate) fn golden_folder(name: &str) -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("../tests/data/goldens").join(name)
}

fn golden_spec(name: &str) -> DecoderSpec {
    read_config(&golden_folder(name)).unwrap().spec
}

fn golden_json(name: &str) -> Value {
    let text = fs::read_to_string(golden_folder(name).join("config.json")).unwrap();
    serde_json::from_str(&text).unwrap()
}

fn spec_of(config: &Value) -> Result<DecoderSpec, String> {
    let config = JsonFile::parse(Path::new("m/config.json"), &config.to_string()).unwrap();
    parse(&config, None).map(|config| config.spec).map_err(|e| e.to_string())
}

/// The config of a golden model with some keys replaced, or removed where the new value is
/// [`REMOVED`].
fn changed(golden: &str, changes: &[(&str, Value)]) -> Result<DecoderSpec, String> {
    let mut config = golden_json(golden);
    for (key, value) in changes {
        if *value == json!(REMOVED) {
            config.as_object_mut().unwrap().remove(*key);
        } else {
            config[*key] = value.clone();
        }
    }
    spec_of(&config)
}

const REMOVED: &str = "(removed)";

#[track_caller]
fn assert_refused(changes: &[(&str, Value)], parts: &[&str]) {
    let message = changed("llama-gqa", changes).unwrap_err();
    for part in ["m/config.json"].iter().chain(parts) {
        assert!(message.contains(part), "{message:?} lacks {part:?}");
    }
}

fn plain_rope(head_dim: usize) -> RopeSpec {
    RopeSpec { theta: 10000.0, rot_dim: head_dim, interleaved: false, scaling: RopeScaling::None }
}

#[test]
fn llama_golden() {
    let expected = DecoderSpec {
        architecture: "LlamaForCausalLM".into(),
        vocab_size: 320,
        hidden_size: 64,
        intermediate_size: 96,
        num_layers: 3,
        num_heads: 4,
        num_kv_heads: 2,
        head_dim: 64,
        rms_norm_eps: 1e-5,
        rope: plain_rope(64),
        max_position_embeddings: 256,
        tie_word_embeddings: false,
        qkv_bias: false,
        o_bias: false,
        mlp_bias: false,
        qk_norm: false,
        windows: vec![None; 3],
        bos: Some(257),
        eos: vec![258],
        torch_dtype: Some(SourceDtype::F32),
    };
    assert_eq!(golden_spec("llama-gqa"), expected);
}

#[test]
fn llama3_golden_has_scaled_rope_and_tied_embeddings() {
    let spec = golden_spec("llama3-rope-tied");
    assert!(spec.tie_word_embeddings);
    assert_eq!((spec.num_kv_heads, spec.max_position_embeddings), (1, 512));
    assert_eq!(spec.rope.theta, 500_000.0);
    let scaling = RopeScaling::Llama3 {
        factor: 8.0,
        low_freq_factor: 1.0,
        high_freq_factor: 4.0,
        original_max_position_embeddings: 64,
    };
    assert_eq!(spec.rope.scaling, scaling);
    assert_eq!(spec.torch_dtype, Some(SourceDtype::F32));
}

#[test]
fn mistral_goldens_have_the_window_or_none() {
    let full = golden_spec("mistral-full");
    assert_eq!((full.head_dim, full.num_heads, full.num_kv_heads), (128, 2, 1));
    assert_eq!(full.windows, vec![None; 3]);
    assert_eq!(full.rope, plain_rope(128));
    assert_eq!(golden_spec("mistral-sliding").windows, vec![Some(12); 3]);
}

#[test]
fn qwen_goldens_have_biases_and_norms() {
    let qwen2 = golden_spec("qwen2-bias");
    assert!(qwen2.qkv_bias && !qwen2.o_bias && !qwen2.mlp_bias && !qwen2.qk_norm);
    assert_eq!((qwen2.head_dim, qwen2.num_kv_heads), (64, 1));
    let qwen3 = golden_spec("qwen3-qknorm");
    assert!(qwen3.qk_norm && !qwen3.qkv_bias && !qwen3.o_bias);
    assert_eq!((qwen3.head_dim, qwen3.num_heads, qwen3.hidden_size), (128, 3, 64));
}

#[test]
fn a52_every_spelling_of_rope_is_read() {
    let v4_type = json!({"type": "llama3", "factor": 8, "low_freq_factor": 1,
        "high_freq_factor": 4, "original_max_position_embeddings": 64});
    let mut v4_rope_type = v4_type.clone();
    v4_rope_type["rope_type"] = json!("llama3");
    let mut v5 = v4_rope_type.clone();
    v5["rope_theta"] = json!(500_000);
    let expected = golden_spec("llama3-rope-tied").rope;
    for changes in [
        vec![("rope_scaling", v4_type)],
        vec![("rope_scaling", v4_rope_type)],
        vec![("rope_scaling", json!(null)), ("rope_theta", json!(null)), ("rope_parameters", v5)],
    ] {
        assert_eq!(changed("llama3-rope-tied", &changes).unwrap().rope, expected);
    }
    let default = changed("llama-gqa", &[("rope_parameters", json!(REMOVED))]).unwrap();
    assert_eq!(default.rope, plain_rope(64));
}

#[test]
fn a52_unknown_rope_kinds_are_refused_by_name() {
    for kind in ["mrope", "proportional", "ntk"] {
        for key in ["type", "rope_type"] {
            let scaling = json!({key: kind, "factor": 2.0});
            assert_refused(&[("rope_scaling", scaling)], &["rope type", kind]);
        }
    }
    let scaling = json!({"rope_type": "llama3", "type": "yarn", "factor": 2.0});
    assert_refused(&[("rope_scaling", scaling)], &["rope_scaling.rope_type", "llama3", "yarn"]);
    assert_refused(&[("rope_scaling", json!({"factor": 2.0}))], &["rope_scaling.rope_type"]);
    let half = json!({"rope_type": "llama3", "factor": 2.0});
    assert_refused(&[("rope_scaling", half)], &["rope_scaling.low_freq_factor", "missing"]);
    for (kind, key) in
        [("dynamic", "alpha"), ("longrope", "short_mscale"), ("longrope", "long_mscale")]
    {
        let scaling = json!({"rope_type": kind, "factor": 2.0, key: 1.5});
        assert_refused(&[("rope_scaling", scaling)], &["rope scaling key", key]);
    }
    let layers = json!({"full_attention": {"rope_type": "linear", "factor": 8.0}});
    assert_refused(&[("rope_parameters", layers)], &["each layer type", "full_attention"]);
    assert_refused(&[("partial_rotary_factor", json!(0.5))], &["partial_rotary_factor", "0.5"]);
}

/// Frequencies and attention factors of every rope kind, as transformers computes them.
#[test]
fn rope_matches_transformers() {
    let path = Path::new(env!("CARGO_MANIFEST_DIR")).join("../tests/data/rope-goldens.json");
    let goldens: Value = serde_json::from_str(&fs::read_to_string(path).unwrap()).unwrap();
    let cases = goldens["cases"].as_array().unwrap();
    for kind in ["linear", "dynamic", "llama3", "yarn", "longrope"] {
        let of_kind = cases.iter().filter(|c| c["config"]["rope_scaling"]["rope_type"] == *kind);
        assert!(of_kind.count() >= 3, "{kind}");
    }
    for case in cases {
        let name = &case["name"];
        let keys = case["config"].as_object().unwrap();
        let mut changes: Vec<(&str, Value)> =
            keys.iter().map(|(key, value)| (key.as_str(), value.clone())).collect();
        changes.push(("rope_parameters", json!(REMOVED)));
        let spec = changed("llama-gqa", &changes).unwrap();
        let context_len = case["context_len"].as_u64().unwrap() as usize;
        assert!(spec.max_position_embeddings >= context_len, "{name}");
        let close = |value: f64, golden: &Value| {
            let golden = golden.as_f64().unwrap();
            (value - golden).abs() <= 1e-6 * golden
        };
        assert!(close(spec.rope.attention_factor(), &case["attention_factor"]), "{name}");
        let golden = case["inv_freq"].as_array().unwrap();
        let inv_freq = spec.rope.inv_freq(context_len);
        assert_eq!(inv_freq.len(), golden.len(), "{name}");
        for (i, (freq, golden)) in inv_freq.iter().zip(golden).enumerate() {
            assert!(close(*freq, golden), "{name}[{i}]: {freq} {golden}");
        }
    }
}

#[test]
fn bad_rope_scaling_is_refused_with_its_value() {
    let refused = |scaling: Value, parts: &[&str]| {
        assert_refused(&[("rope_scaling", scaling)], parts);
    };
    for kind in ["linear", "dynamic", "yarn", "longrope"] {
        let key = if kind == "longrope" { "short_factor" } else { "factor" };
        let text = json!({"rope_type": kind, key: "x"});
        refused(text, &[&format!("rope_scaling.{key}"), "must be a"]);
    }
    for kind in ["linear", "dynamic"] {
        refused(json!({"rope_type": kind}), &["rope_scaling.factor", "missing"]);
        refused(json!({"rope_type": kind, "factor": 0.5}), &[kind, "factor 0.5"]);
        refused(json!({"rope_type": kind, "factor": 1e300}), &["max_position_embeddings"]);
    }
    let betas = json!({"rope_type": "yarn", "factor": 2, "beta_fast": 1, "beta_slow": 2});
    refused(betas, &["beta_fast 1", "beta_slow 2"]);
    let attention = json!({"rope_type": "yarn", "factor": 2, "attention_factor": -1});
    refused(attention, &["attention factor", "-1"]);
    let longrope = |short: Vec<f32>, long: Vec<f32>| {
        let mut scaling = json!({"rope_type": "longrope", "factor": 2});
        scaling["short_factor"] = json!(short);
        scaling["long_factor"] = json!(long);
        scaling
    };
    refused(longrope(vec![1.0; 31], vec![1.0; 32]), &["31 short_factor", "takes 32"]);
    refused(longrope(vec![1.0; 32], vec![0.0; 32]), &["long_factor factor 0 is 0"]);
    let one = ("original_max_position_embeddings", json!(1));
    let scaling = ("rope_scaling", longrope(vec![1.0; 32], vec![1.0; 32]));
    assert_refused(&[one, scaling], &["attention factor", "inf"]);
}

#[test]
fn a53_head_dim_wins_over_hidden_over_heads() {
    let sizes = |head_dim: Value| {
        let changes = [
            ("hidden_size", json!(5120)),
            ("num_attention_heads", json!(32)),
            ("num_key_value_heads", json!(8)),
            ("head_dim", head_dim),
        ];
        let spec = changed("llama-gqa", &changes).unwrap();
        (spec.head_dim, spec.rope.rot_dim)
    };
    assert_eq!(sizes(json!(128)), (128, 128));
    assert_eq!(sizes(json!(null)), (160, 160));
    assert_eq!(sizes(json!(REMOVED)), (160, 160));
    let qwen3 = changed("qwen3-qknorm", &[("head_dim", json!(REMOVED))]).unwrap();
    assert_eq!(qwen3.head_dim, 128);
    let uneven = [("head_dim", json!(null)), ("num_attention_heads", json!(6))];
    assert_refused(&uneven, &["head_dim", "hidden_size 64", "num_attention_heads 6"]);
}

#[test]
fn a54_windows_count_only_where_they_are_used() {
    let qwen2 = |changes: &[(&str, Value)]| changed("qwen2-bias", changes).unwrap().windows;
    assert_eq!(qwen2(&[]), [None, None]);
    assert_eq!(qwen2(&[("use_sliding_window", json!(true))]), [None, Some(8)]);
    let all = [("use_sliding_window", json!(true)), ("max_window_layers", json!(0))];
    assert_eq!(qwen2(&all), [Some(8), Some(8)]);
    let null = [("use_sliding_window", json!(true)), ("sliding_window", json!(null))];
    assert_eq!(qwen2(&null), [None, None]);
    let types = json!(["sliding_attention", "full_attention"]);
    let typed = [("use_sliding_window", json!(true)), ("layer_types", types.clone())];
    assert_eq!(qwen2(&typed), [Some(8), None]);
    let unused = changed("qwen2-bias", &[("layer_types", types)]).unwrap_err();
    assert!(unused.contains("layer_types") && unused.contains("no window"), "{unused}");

    let mistral = |window: Value| {
        changed("mistral-sliding", &[("sliding_window", window)]).map(|spec| spec.windows[0])
    };
    assert_eq!(mistral(json!(0)), Ok(None));
    assert_eq!(mistral(json!(null)), Ok(None));
    assert_eq!(mistral(json!(4096)), Ok(Some(4096)));
    assert_eq!(mistral(json!(REMOVED)), Ok(Some(4096)));
    assert!(mistral(json!(-1)).unwrap_err().contains("`sliding_window`: is -1"));
}

#[test]
fn layer_types_are_checked() {
    let types = |types: Value| [("layer_types", types)];
    assert_refused(&types(json!(["full_attention"])), &["layer_types", "1 entries", "3 layers"]);
    let other = json!(["full_attention", "chunked_attention", "full_attention"]);
    assert_refused(&types(other), &["layer type", "chunked_attention"]);
    assert_refused(&types(json!(vec!["sliding_attention"; 3])), &["layer_types"]);
    assert_refused(&types(json!([1, 2, 3])), &["layer_types", "list of strings"]);
}

#[test]
fn a55_eos_is_the_union_of_both_files() {
    let eos = |config: Value, generation: &str| {
        let mut json = golden_json("llama-gqa");
        json["eos_token_id"] = config;
        let config = JsonFile::parse(Path::new("config.json"), &json.to_string())?;
        let generation = JsonFile::parse(Path::new("generation_config.json"), generation)?;
        parse(&config, Some(&generation)).map(|config| config.spec.eos)
    };
    assert_eq!(eos(json!(258), "{}").unwrap(), [258]);
    assert_eq!(eos(json!([258, 5, 258]), r#"{"eos_token_id": 5}"#).unwrap(), [258, 5]);
    assert_eq!(eos(json!(null), r#"{"eos_token_id": [7, 8, 7]}"#).unwrap(), [7, 8]);
    let outside = eos(json!(258), r#"{"eos_token_id": 320}"#).unwrap_err().to_string();
    assert!(outside.contains("generation_config.json") && outside.contains("320"), "{outside}");
    let negative = eos(json!([258, -1]), "{}").unwrap_err().to_string();
    assert!(negative.contains("`eos_token_id`") && negative.contains("-1"), "{negative}");
}

#[test]
fn generation_defaults_keep_explicit_zeros() {
    let read = |text: &str| {
        GenerationDefaults::read(&JsonFile::parse(Path::new("generation_config.json"), text)?)
    };
    assert_eq!(read("{}").unwrap(), GenerationDefaults::default());
    let defaults = read(r#"{"temperature": 0, "top_k": 0, "top_p": 0.9, "min_p": null}"#).unwrap();
    assert_eq!(defaults.temperature, Some(0.0));
    assert_eq!(defaults.top_k, Some(0));
    assert_eq!(defaults.top_p, Some(0.9));
    assert_eq!((defaults.min_p, defaults.repetition_penalty), (None, None));
    let error = read(r#"{"top_k": "many"}"#).unwrap_err().to_string();
    assert!(error.contains("generation_config.json") && error.contains("`top_k`"), "{error}");
    assert!(read(r#"{"temperature": true}"#).is_err());
}

#[test]
fn generation_defaults_are_read_and_checked() {
    let read = |text: &str| {
        GenerationDefaults::read(&JsonFile::parse(Path::new("generation_config.json"), text)?)
    };
    let sampled = r#""temperature": 0.6, "top_p": 0.9, "top_k": 40, "min_p": 0.05,
        "repetition_penalty": 1.1, "max_new_tokens": 512"#;
    let expected = GenerationDefaults {
        temperature: Some(0.6),
        top_p: Some(0.9),
        top_k: Some(40),
        min_p: Some(0.05),
        repetition_penalty: Some(1.1),
        max_new_tokens: Some(512),
    };
    assert_eq!(read(&format!("{{{sampled}}}")).unwrap(), expected);
    assert_eq!(read(&format!(r#"{{{sampled}, "do_sample": true}}"#)).unwrap(), expected);
    let greedy = GenerationDefaults {
        temperature: Some(0.0),
        repetition_penalty: Some(1.1),
        max_new_tokens: Some(512),
        ..Default::default()
    };
    assert_eq!(read(&format!(r#"{{{sampled}, "do_sample": false}}"#)).unwrap(), greedy);
    for key in [
        "temperature",
        "top_p",
        "top_k",
        "min_p",
        "repetition_penalty",
        "max_new_tokens",
        "do_sample",
    ] {
        let error = read(&format!(r#"{{"{key}": "x"}}"#)).unwrap_err().to_string();
        assert!(error.contains(&format!("generation_config.json: key `{key}`")), "{error}");
    }
    assert!(read(r#"{"max_new_tokens": 0}"#).unwrap_err().to_string().contains("is 0"));
}

#[test]
fn both_spellings_of_the_dtype_are_read() {
    let dtype = |key: &str, name: &str| {
        changed("llama-gqa", &[("dtype", json!(null)), (key, json!(name))]).map(|s| s.torch_dtype)
    };
    assert_eq!(dtype("torch_dtype", "bfloat16"), Ok(Some(SourceDtype::Bf16)));
    assert_eq!(dtype("dtype", "torch.float16"), Ok(Some(SourceDtype::F16)));
    assert_eq!(dtype("other", "bfloat16"), Ok(None));
    assert!(dtype("dtype", "float8_e4m3fn").unwrap_err().contains("`float8_e4m3fn`"));
}

#[test]
fn biases_follow_the_config() {
    let on = [("attention_bias", json!(true)), ("mlp_bias", json!(true))];
    let llama = changed("llama-gqa", &on).unwrap();
    assert!(llama.qkv_bias && llama.o_bias && llama.mlp_bias);
    let qwen3 = changed("qwen3-qknorm", &on).unwrap();
    assert!(qwen3.qkv_bias && qwen3.o_bias && !qwen3.mlp_bias);
}

#[test]
fn what_is_not_implemented_is_refused_by_name() {
    let architectures = |names: Value| [("architectures", names)];
    assert_refused(&architectures(json!(["GPT2LMHeadModel"])), &["`GPT2LMHeadModel`"]);
    assert_refused(&architectures(json!([])), &["architectures", "names 0"]);
    assert_refused(&architectures(json!("LlamaForCausalLM")), &["architectures", "list"]);
    assert_refused(&architectures(json!(null)), &["architectures", "missing"]);
    let awq = json!({"quant_method": "awq", "bits": 4});
    assert_refused(&[("quantization_config", awq)], &["quantisation scheme", "`awq`"]);
    assert_refused(&[("quantization_config", json!({}))], &["quantisation scheme"]);
    assert_refused(&[("hidden_act", json!("gelu"))], &["hidden_act", "`gelu`"]);
}

#[test]
fn x8_sizes_out_of_range_are_refused_with_key_value_and_limit() {
    for (key, limit) in [
        ("num_attention_heads", "1024"),
        ("num_key_value_heads", "1024"),
        ("num_hidden_layers", "1024"),
        ("hidden_size", "131072"),
        ("intermediate_size", "1048576"),
        ("vocab_size", "4000000"),
        ("head_dim", "256"),
        ("max_position_embeddings", "134217728"),
    ] {
        for value in ["0", "1000000000", "-1", "1.5", "18446744073709551615", "1e30"] {
            let number: Value = serde_json::from_str(value).unwrap();
            let shown = number.to_string();
            assert_refused(&[(key, number)], &[key, &format!("is {shown};"), limit]);
        }
        for value in [json!("64"), json!([64]), json!({"n": 64}), json!(true)] {
            assert_refused(&[(key, value)], &[key, "must be a whole number", limit]);
        }
    }
    for key in ["hidden_size", "intermediate_size", "vocab_size", "num_hidden_layers"] {
        assert_refused(&[(key, json!(null))], &[key, "missing"]);
    }
}

#[test]
fn x8_values_that_conflict_are_refused() {
    let kv_heads = [("num_key_value_heads", json!(3))];
    assert_refused(&kv_heads, &["num_attention_heads is 4", "num_key_value_heads 3"]);
    assert_refused(&[("head_dim", json!(24))], &["head_dim is 24", "multiple of 16"]);
    assert_refused(&[("rms_norm_eps", json!(0))], &["rms_norm_eps is 0"]);
    assert_refused(&[("rms_norm_eps", json!("1e-5"))], &["rms_norm_eps", "number"]);
    assert_refused(&[("bos_token_id", json!(320))], &["token id 320", "vocabulary of 320"]);
    let theta = |theta: f64| [("rope_parameters", json!({"rope_theta": theta}))];
    assert_refused(&theta(0.0), &["rope_theta is 0"]);
    assert_refused(&theta(-1e4), &["rope_theta is -10000"]);
    assert_refused(&[("tie_word_embeddings", json!("yes"))], &["tie_word_embeddings", "`yes`"]);
}

#[test]
fn x8_files_that_are_no_config_are_refused() {
    let dir = tempfile::tempdir().unwrap();
    let error = || read_config(dir.path()).unwrap_err().to_string();
    assert!(error().contains("holds no config.json"));
    let deep = "[".repeat(1_000_000);
    for text in ["", "[]", "{", "{} {}", "{\"a\": NaN}", "{\"a\": 1e999}", &deep] {
        fs::write(dir.path().join("config.json"), text).unwrap();
        assert!(error().contains("config.json"), "{}", error());
    }
    let file = fs::File::create(dir.path().join("config.json")).unwrap();
    file.set_len(MAX_CONFIG_BYTES + 1).unwrap();
    assert!(error().contains("is 16777217; the limit is 16777216"), "{}", error());
}

fn any_json() -> impl Strategy<Value = Value> {
    let leaf = prop_oneof![
        Just(Value::Null),
        any::<bool>().prop_map(Value::from),
        any::<i64>().prop_map(Value::from),
        any::<u64>().prop_map(Value::from),
        (0u64..300).prop_map(Value::from),
        any::<f64>().prop_map(Value::from),
        "[a-z_]{0,8}".prop_map(Value::from),
    ];
    leaf.prop_recursive(2, 8, 4, |inner| {
        prop_oneof![
            prop::collection::vec(inner.clone(), 0..4).prop_map(Value::from),
            prop::collection::btree_map("[a-z_]{1,8}", inner, 0..4)
                .prop_map(|map| Value::Object(map.into_iter().collect())),
        ]
    })
}

proptest! {
    /// Any value under any key a golden config has: refused, or a spec that holds its promises.
    #[test]
    fn mutated_configs_never_panic(
        golden in prop::sample::select(&GOLDENS[..]),
        edits in prop::collection::vec((any::<prop::sample::Index>(), any_json()), 1..4),
    ) {
        let mut config = golden_json(golden);
        let object = config.as_object_mut().unwrap();
        let keys: Vec<String> = object.keys().cloned().collect();
        for (key, value) in edits {
            object[&keys[key.index(keys.len())]] = value;
        }
        if let Ok(spec) = spec_of(&config) {
            prop_assert!(spec.num_heads.is_multiple_of(spec.num_kv_heads));
            prop_assert_eq!(spec.windows.len(), spec.num_layers);
            let inv_freq = spec.rope.inv_freq(spec.max_position_embeddings);
            prop_assert_eq!(inv_freq.len() * 2, spec.rope.rot_dim);
            prop_assert!(inv_freq.iter().all(|f| f.is_finite()));
            prop_assert!(spec.rope.attention_factor().is_finite());
        }
    }

    #[test]
    fn random_text_never_panics(text in ".{0,80}") {
        if let Ok(config) = JsonFile::parse(Path::new("config.json"), &text) {
            prop_assert!(parse(&config, None).is_err());
        }
    }
}

#[test]
fn a_null_number_of_kv_heads_is_one_a_query_head() {
    let kv_heads = |value| changed("mistral-full", &[("num_key_value_heads", value)]);
    let heads = golden_spec("mistral-full").num_heads;
    assert_eq!(kv_heads(Value::Null).unwrap().num_kv_heads, heads);
}

#[test]
fn endless_lists_of_token_ids_are_refused() {
    let ids: Vec<u32> = (0..300).collect();
    assert_refused(&[("eos_token_id", json!(ids))], &["eos_token_id", "lists 300", "limit is 256"]);
}
