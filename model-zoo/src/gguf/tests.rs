//! Hand-built files, most of them hostile, mutated ones, and a real model where it is at hand.

use proptest::prelude::*;
use tokenizers::{PreTokenizer, pre_tokenizers::byte_level::ByteLevel};

use super::{testing::Builder, *};
use crate::{
    source::{SourceDtype, WeightSource},
    spec::{LongRope, RopeScaling, RopeSpec, Yarn},
    weights::{check_weights, expected_weights, layer_weight},
};

const HIDDEN: usize = 32;
const HEAD_DIM: usize = 16;
const VOCAB: usize = 300;

/// Ascending values, so that a row says where it was stored.
fn ramp(shape: &[usize]) -> Vec<f32> {
    (0..shape.iter().product()).map(|i: usize| i as f32).collect()
}

fn ramp_tensor(builder: Builder, name: &str, shape: &[usize]) -> Builder {
    builder.floats(name, shape, &ramp(shape))
}

/// One layer, two query heads and one key head of 16, tied embeddings, no tokenizer.
fn tiny(architecture: &str) -> Builder {
    let key = |suffix: &str| format!("{architecture}.{suffix}");
    let mut builder = Builder::new()
        .string("general.architecture", architecture)
        .u32(&key("block_count"), 1)
        .u32(&key("context_length"), 128)
        .u32(&key("embedding_length"), HIDDEN as u32)
        .u32(&key("feed_forward_length"), 48)
        .u32(&key("attention.head_count"), 2)
        .u32(&key("attention.head_count_kv"), 1)
        .f32(&key("attention.layer_norm_rms_epsilon"), 1e-5)
        .f32(&key("rope.freq_base"), 50000.0)
        .u32("tokenizer.ggml.bos_token_id", 1)
        .u32("tokenizer.ggml.eos_token_id", 2);
    let kv = HEAD_DIM;
    for (name, shape) in [
        ("token_embd.weight", &[VOCAB, HIDDEN][..]),
        ("output_norm.weight", &[HIDDEN]),
        ("blk.0.attn_norm.weight", &[HIDDEN]),
        ("blk.0.attn_q.weight", &[2 * HEAD_DIM, HIDDEN]),
        ("blk.0.attn_k.weight", &[kv, HIDDEN]),
        ("blk.0.attn_v.weight", &[kv, HIDDEN]),
        ("blk.0.attn_output.weight", &[HIDDEN, 2 * HEAD_DIM]),
        ("blk.0.ffn_norm.weight", &[HIDDEN]),
        ("blk.0.ffn_gate.weight", &[48, HIDDEN]),
        ("blk.0.ffn_up.weight", &[48, HIDDEN]),
        ("blk.0.ffn_down.weight", &[HIDDEN, 48]),
    ] {
        builder = ramp_tensor(builder, name, shape);
    }
    builder
}

fn open(builder: &Builder) -> Result<GgufFile, String> {
    GgufFile::from_bytes(Path::new("dir/model.gguf"), builder.bytes()).map_err(|e| e.to_string())
}

fn spec(builder: &Builder) -> Result<DecoderSpec, String> {
    open(builder)?.spec().map_err(|e| e.to_string())
}

fn source(builder: &Builder) -> (DecoderSpec, GgufSource) {
    let file = open(builder).unwrap();
    let spec = file.spec().unwrap();
    let source = file.into_source().unwrap();
    (spec, source)
}

fn parse_error(bytes: &[u8]) -> String {
    header::parse(Path::new("m.gguf"), bytes).unwrap_err().to_string()
}

#[track_caller]
fn assert_says(message: &str, parts: &[&str]) {
    for part in parts {
        assert!(message.contains(part), "{message:?} lacks {part:?}");
    }
}

#[test]
fn metadata_becomes_a_spec() {
    let expected = DecoderSpec {
        architecture: "LlamaForCausalLM".into(),
        vocab_size: VOCAB,
        hidden_size: HIDDEN,
        intermediate_size: 48,
        num_layers: 1,
        num_heads: 2,
        num_kv_heads: 1,
        head_dim: HEAD_DIM,
        rms_norm_eps: 1e-5,
        rope: RopeSpec {
            theta: 50000.0,
            rot_dim: HEAD_DIM,
            interleaved: false,
            scaling: RopeScaling::None,
        },
        max_position_embeddings: 128,
        tie_word_embeddings: true,
        qkv_bias: false,
        o_bias: false,
        mlp_bias: false,
        qk_norm: false,
        windows: vec![None],
        bos: Some(1),
        eos: vec![2],
        torch_dtype: None,
    };
    assert_eq!(spec(&tiny("llama")), Ok(expected.clone()));
    let mut version2 = tiny("llama");
    version2.version = 2;
    assert_eq!(spec(&version2), Ok(expected));
}

#[test]
fn files_are_mapped() {
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("model.gguf");
    std::fs::write(&path, tiny("llama").bytes()).unwrap();
    let file = GgufFile::open(&path).unwrap();
    assert_eq!(file.spec().unwrap(), spec(&tiny("llama")).unwrap());
    let missing = GgufFile::open(&dir.path().join("other.gguf")).err().expect("is not there");
    assert_says(&missing.to_string(), &["other.gguf"]);
}

#[test]
fn optional_keys_and_tensors_change_the_spec() {
    let mistral = spec(&tiny("llama").u32("llama.attention.sliding_window", 64)).unwrap();
    assert_eq!(mistral.windows, [Some(64)]);
    let untied = spec(&ramp_tensor(tiny("llama"), "output.weight", &[VOCAB, HIDDEN])).unwrap();
    assert!(!untied.tie_word_embeddings);
    let eot = spec(&tiny("llama").u32("tokenizer.ggml.eot_token_id", 7)).unwrap();
    assert_eq!(eot.eos, [2, 7]);
    let all =
        tiny("llama").u32("tokenizer.ggml.eot_token_id", 2).u32("tokenizer.ggml.eom_token_id", 9);
    assert_eq!(spec(&all).unwrap().eos, [2, 9]);
    let qwen2 = spec(&ramp_tensor(tiny("qwen2"), "blk.0.attn_q.bias", &[32])).unwrap();
    assert!(qwen2.qkv_bias && !qwen2.qk_norm);
    assert!(spec(&tiny("qwen3")).unwrap().qk_norm);
    let wide = tiny("qwen3").u32("qwen3.attention.key_length", 32);
    assert_eq!(spec(&wide).unwrap().head_dim, 32);
}

#[test]
fn rope_scaling_comes_from_keys() {
    let rope = |builder: Builder| spec(&builder).map(|spec| spec.rope);
    let scaling = |builder: Builder| rope(builder).map(|rope| rope.scaling);
    let kind = |kind: &str| tiny("llama").string("llama.rope.scaling.type", kind);
    let factor = |builder: Builder, factor| builder.f32("llama.rope.scaling.factor", factor);
    assert_eq!(scaling(kind("none")), Ok(RopeScaling::None));
    assert_eq!(scaling(factor(kind("none"), 4.0)), Ok(RopeScaling::None));
    assert_eq!(scaling(tiny("llama").f32("llama.rope.scale_linear", 1.0)), Ok(RopeScaling::None));
    let linear = Ok(RopeScaling::Linear { factor: 4.0 });
    assert_eq!(scaling(factor(kind("linear"), 4.0)), linear);
    assert_eq!(scaling(factor(tiny("llama"), 4.0)), linear);
    assert_eq!(scaling(tiny("llama").f32("llama.rope.scale_linear", 4.0)), linear);
    assert_eq!(spec(&factor(kind("linear"), 2.5)).unwrap().max_position_embeddings, 320);

    let yarn = factor(kind("yarn"), 4.0)
        .u32("llama.rope.scaling.original_context_length", 64)
        .f32("llama.rope.scaling.yarn_beta_slow", 2.0)
        .f32("llama.rope.scaling.attn_factor", 0.5);
    let expected = Yarn {
        factor: 4.0,
        original_max_position_embeddings: 64,
        beta_fast: 32.0,
        beta_slow: 2.0,
        truncate: true,
        attention_factor: 0.5 * (1.0 + 0.1 * 4f64.ln()),
    };
    assert_eq!(scaling(yarn.clone()), Ok(RopeScaling::Yarn(expected)));
    assert_eq!(spec(&yarn).unwrap().max_position_embeddings, 256);
    assert!(rope(yarn.clone().f32("llama.rope.scaling.yarn_ext_factor", -1.0)).is_ok());

    let refused = |builder: Builder, parts: &[&str]| {
        assert_says(&spec(&builder).unwrap_err(), parts);
    };
    refused(kind("su"), &["rope scaling `su`"]);
    refused(kind("linear"), &["`llama.rope.scaling.factor`", "missing"]);
    refused(kind("yarn"), &["`llama.rope.scaling.factor`", "missing"]);
    refused(factor(kind("linear"), 0.5), &["factor 0.5", "at least 1"]);
    refused(factor(kind("linear"), 1e30), &["max_position_embeddings", "134217728"]);
    let key = |key: &str, value| yarn.clone().f32(&format!("llama.rope.scaling.{key}"), value);
    refused(key("yarn_ext_factor", 0.5), &["yarn_ext_factor 0.5"]);
    refused(key("yarn_log_multiplier", 0.1), &["yarn_log_multiplier 0.1"]);
    refused(key("yarn_beta_fast", 1.0), &["beta_fast 1", "beta_slow 2"]);
    let sharp = factor(kind("linear"), 2.0).f32("llama.rope.scaling.attn_factor", 2.0);
    refused(sharp, &["attn_factor 2"]);
}

#[test]
fn longrope_comes_from_two_tensors() {
    let with = |builder: Builder, name: &str, divisor: f32| {
        builder.floats(&format!("rope_factors_{name}.weight"), &[8], &[divisor; 8])
    };
    let both = with(with(tiny("llama"), "short", 1.0), "long", 4.0)
        .u32("llama.rope.scaling.original_context_length", 32)
        .f32("llama.rope.scaling.attn_factor", 1.25);
    let expected = LongRope {
        short_factor: vec![1.0; 8],
        long_factor: vec![4.0; 8],
        original_max_position_embeddings: 32,
        attention_factor: 1.25,
    };
    let longrope = both.clone().string("llama.rope.scaling.type", "longrope");
    for builder in [&both, &longrope] {
        let (spec, source) = source(builder);
        assert_eq!(spec.rope.scaling, RopeScaling::LongRope(expected.clone()));
        check_weights(&spec, &source).unwrap();
    }
    let refused = |builder: Builder, parts: &[&str]| {
        assert_says(&spec(&builder).unwrap_err(), parts);
    };
    refused(with(tiny("llama"), "short", 1.0), &["rope_factors_long.weight"]);
    let freqs = both.clone().floats("rope_freqs.weight", &[8], &[1.0; 8]);
    refused(freqs, &["rope_freqs.weight alone"]);
    let yarn = both.string("llama.rope.scaling.type", "yarn");
    refused(yarn, &["yarn with other divisors"]);
    let bare = tiny("llama").string("llama.rope.scaling.type", "longrope");
    refused(bare, &["longrope with no divisors"]);
}

#[test]
fn rope_factors_come_from_their_tensor() {
    let factors = [1.0, 1.0, 1.5, 2.0, 4.0, 8.0, 8.0, 8.0];
    let (spec_with, source) = source(&tiny("llama").floats("rope_freqs.weight", &[8], &factors));
    assert_eq!(spec_with.rope.scaling, RopeScaling::Factors(factors.to_vec()));
    check_weights(&spec_with, &source).unwrap();
    let short = tiny("llama").floats("rope_freqs.weight", &[7], &factors[..7]);
    assert_says(&spec(&short).unwrap_err(), &["`rope_freqs.weight`", "7 elements"]);
    let zero = tiny("llama").floats("rope_freqs.weight", &[8], &[0.0; 8]);
    assert_says(&spec(&zero).unwrap_err(), &["rope factor 0 is 0"]);
}

#[test]
fn names_and_shapes_are_hugging_faces() {
    let mut builder = tiny("qwen3");
    for (name, shape) in
        [("blk.0.attn_q_norm.weight", HEAD_DIM), ("blk.0.attn_k_norm.weight", HEAD_DIM)]
    {
        builder = ramp_tensor(builder, name, &[shape]);
    }
    let (spec, source) = source(&builder);
    check_weights(&spec, &source).unwrap();
    assert_eq!(source.names().len(), expected_weights(&spec).len());
    let down = layer_weight(0, "mlp.down_proj.weight");
    assert_eq!(source.shape(&down), Some(&[HIDDEN, 48][..]));
    assert_eq!(source.dtype(&down), Some(SourceDtype::F32));
    let mut row = [0.0; 48];
    source.read_row(&down, 3, &mut row).unwrap();
    assert_eq!((row[0], row[47]), (144.0, 191.0));
    assert!(source.location(&down).ends_with("model.gguf"));
}

#[test]
fn biases_are_mapped() {
    let mut builder = tiny("qwen2");
    for (name, len) in [("q", 32), ("k", 16), ("v", 16)] {
        builder = ramp_tensor(builder, &format!("blk.0.attn_{name}.bias"), &[len]);
    }
    let (spec, source) = source(&builder);
    check_weights(&spec, &source).unwrap();
}

/// What llama.cpp's converter does to query and key rows: within a head, `[2, half]` → `[half, 2]`.
fn converter_order(heads: usize) -> Vec<usize> {
    let half = HEAD_DIM / 2;
    let mut order = Vec::new();
    for head in 0..heads {
        for i in 0..half {
            for part in 0..2 {
                order.push(head * HEAD_DIM + part * half + i);
            }
        }
    }
    order
}

#[test]
fn llama_query_and_key_rows_are_put_back() {
    let mut builder = tiny("llama");
    // Row r of the model holds the value r; the file stores rows in the converter's order.
    for (name, heads) in [("q", 2), ("k", 1), ("v", 1)] {
        let rows: Vec<f32> = converter_order(heads).iter().map(|&row| row as f32).collect();
        builder = builder.floats(&format!("blk.0.attn_{name}.bias"), &[rows.len()], &rows);
    }
    let (spec, source) = source(&builder);
    check_weights(&spec, &source).unwrap();
    let bias = |name: &str, len: usize| {
        let mut out = vec![0.0; len];
        source.read_row(&layer_weight(0, name), 0, &mut out).unwrap();
        out
    };
    assert_eq!(bias("self_attn.q_proj.bias", 32), ramp(&[32]));
    assert_eq!(bias("self_attn.k_proj.bias", 16), ramp(&[16]));
    let stored: Vec<f32> = converter_order(1).iter().map(|&row| row as f32).collect();
    assert_eq!(bias("self_attn.v_proj.bias", 16), stored);

    let first_of_row = |name: &str, row: usize| {
        let mut out = [0.0; HIDDEN];
        source.read_row(&layer_weight(0, name), row, &mut out).unwrap();
        out[0] as usize / HIDDEN
    };
    for (stored, model) in converter_order(2).into_iter().enumerate() {
        assert_eq!(first_of_row("self_attn.q_proj.weight", model), stored);
    }
    assert_eq!(first_of_row("self_attn.v_proj.weight", 5), 5);
}

#[test]
fn other_architectures_keep_their_row_order() {
    let (_, source) = source(&tiny("qwen2"));
    let mut out = [0.0; HIDDEN];
    source.read_row(&layer_weight(0, "self_attn.q_proj.weight"), 1, &mut out).unwrap();
    assert_eq!(out[0], HIDDEN as f32);
}

#[test]
fn bad_row_requests_are_errors() {
    let (_, source) = source(&ramp_tensor(tiny("llama"), "blk.0.attn_q.bias", &[32]));
    let error = |name: &str, row, len| {
        source.read_row(name, row, &mut vec![0.0; len]).unwrap_err().to_string()
    };
    let weight = layer_weight(0, "self_attn.q_proj.weight");
    assert_says(&error(&weight, 32, HIDDEN), &["model.gguf", "blk.0.attn_q.weight", "row 32"]);
    assert_says(&error(&weight, usize::MAX, HIDDEN), &["there are 32"]);
    assert_says(&error(&weight, 0, HIDDEN + 1), &["output has 33"]);
    let bias = layer_weight(0, "self_attn.q_proj.bias");
    assert_says(&error(&bias, 1, 32), &["row 1"]);
    assert_says(&error(&bias, 0, 0), &["output has 0"]);
    assert_says(&error("blk.0.attn_q.weight", 0, HIDDEN), &["does not exist"]);
}

#[test]
fn tensors_of_other_models_are_refused() {
    for name in
        ["blk.0.ffn_gate_exps.weight", "blk.01.attn_q.weight", "blk.+0.attn_q.weight", "blk.0", "v"]
    {
        let file = open(&ramp_tensor(tiny("llama"), name, &[32])).unwrap();
        let error = file.into_source().err().expect("is unknown").to_string();
        assert_says(&error, &["model.gguf", name, "not part of LlamaForCausalLM"]);
    }
    let heads = tiny("llama").u32("llama.attention.key_length", 64);
    let error = open(&heads).unwrap().into_source().err().expect("has half a head").to_string();
    assert_says(&error, &["32 rows", "heads have 64"]);
}

#[test]
fn bad_keys_are_refused_by_name() {
    let refused = |builder: Builder, parts: &[&str]| {
        assert_says(&spec(&builder).unwrap_err(), parts);
    };
    let tiny = || tiny("llama");
    refused(tiny().string("general.architecture", "gemma3"), &["architecture `gemma3`"]);
    refused(tiny().u32("general.architecture", 1), &["`general.architecture`", "a string"]);
    refused(tiny().without("llama.block_count"), &["`llama.block_count`", "missing"]);
    refused(tiny().u32("llama.block_count", 1_000_000_000), &["1000000000", "1 to 1024"]);
    refused(tiny().u32("llama.attention.head_count", 0), &["head_count`: is 0"]);
    refused(tiny().f32("llama.embedding_length", 1.0), &["embedding_length", "whole number"]);
    refused(tiny().i32s("llama.attention.head_count_kv", &[1]), &["head_count_kv", "a list"]);
    refused(tiny().u32("llama.attention.head_count_kv", 3), &["must be a multiple of", "heads 3"]);
    refused(tiny().u32("llama.expert_count", 8), &["mixture of experts", "8"]);
    refused(tiny().u32("llama.rope.dimension_count", 8), &["dimension_count", "is 8"]);
    refused(tiny().u32("llama.attention.value_length", 32), &["value_length", "is 32"]);
    refused(tiny().u32("tokenizer.ggml.eos_token_id", 300), &["token id 300"]);
    refused(tiny().strings("tokenizer.ggml.tokens", &["x"; 301]), &["300 rows", "301 tokens"]);
    refused(tiny().u32("split.count", 2), &["split into 2 files"]);
}

#[test]
fn x10_counts_near_2_to_64_are_refused() {
    let header = |tensors: u64, keys: u64| {
        [b"GGUF", &3u32.to_le_bytes()[..], &tensors.to_le_bytes(), &keys.to_le_bytes()].concat()
    };
    for count in [1, 1 << 32, 1 << 63, u64::MAX] {
        let shown = count.to_string();
        assert_says(&parse_error(&header(count, 0)), &["m.gguf", "number of tensors", &shown]);
        assert_says(&parse_error(&header(0, count)), &["m.gguf", "number of keys", &shown]);
    }
    assert!(header::parse(Path::new("m.gguf"), &header(0, 0)).is_ok());
    for kind in [0u32, 5, 8, 12] {
        let array = Builder::new().array("k", kind, u64::MAX / 8, b"");
        assert_says(&parse_error(&array.bytes()), &["array's length", "2305843009213693951"]);
    }
    let string = Builder::new().key("k", 8, &u64::MAX.to_le_bytes());
    assert_says(&parse_error(&string.bytes()), &["length of a value", "18446744073709551615"]);
}

#[test]
fn x10_alignment_must_be_a_small_power_of_two() {
    let alignment = |kind: u32, bytes: &[u8]| {
        let builder = Builder::new().key("general.alignment", kind, bytes);
        parse_error(&builder.bytes())
    };
    for value in [0u64, (1 << 20) + 1, 1 << 21, 1 << 63, u64::MAX] {
        let shown = format!("is {value}; it must be 1 to 1048576");
        assert_says(&alignment(10, &value.to_le_bytes()), &["`general.alignment`", &shown]);
    }
    assert_says(&alignment(4, &48u32.to_le_bytes()), &["is 48", "power of two"]);
    assert_says(&alignment(5, &(-32i32).to_le_bytes()), &["`general.alignment`"]);
    let mut wide = Builder::new().u32("general.alignment", 4096);
    wide.alignment = 4096;
    let wide = ramp_tensor(ramp_tensor(wide, "a", &[1]), "b", &[2]);
    let header = header::parse(Path::new("m.gguf"), &wide.bytes()).unwrap();
    assert_eq!(header.tensors[1].data, 8192..8200);
}

#[test]
fn x10_tensor_dimensions_and_offsets_must_fit_the_file() {
    let edited = |edit: fn(&mut testing::Tensor)| {
        let builder = ramp_tensor(ramp_tensor(Builder::new(), "first", &[8]), "t", &[4, 8]);
        parse_error(&builder.edit_tensor(edit).bytes())
    };
    assert_says(&edited(|t| t.dimensions = vec![u64::MAX, 2]), &["`t`", "overflows"]);
    assert_says(&edited(|t| t.dimensions = vec![1 << 33; 4]), &["`t`", "overflows"]);
    assert_says(&edited(|t| t.dimensions = vec![8, 0]), &["`t`", "dimension of 0"]);
    assert_says(&edited(|t| t.dimensions = vec![]), &["`t`", "has 0 dimensions"]);
    assert_says(&edited(|t| t.dimensions = vec![1; 5]), &["`t`", "has 5 dimensions", "1 to 4"]);
    assert_says(&edited(|t| t.dimensions[1] = 5), &["`t`", "ends at byte 192", "holds 160"]);
    assert_says(&edited(|t| t.offset = u64::MAX - 31), &["`t`", "overflows"]);
    assert_says(&edited(|t| t.offset = 1 << 62), &["`t`", "the file holds 160"]);
    assert_says(&edited(|t| t.offset = 33), &["`t`", "offset 33", "multiple of 32"]);
    assert_says(&edited(|t| t.offset = 0), &["starts at byte 0", "ends at"]);
    assert_says(&edited(|t| t.name = "first".into()), &["`first`", "twice"]);
    assert_says(&edited(|t| t.kind = 8), &["`t`", "rows of 8 elements", "Q8_0", "32"]);
}

#[test]
fn unsupported_block_types_are_refused_by_name() {
    for (kind, name) in
        [(9, "Q8_1"), (15, "Q8_K"), (16, "IQ2_XXS"), (28, "F64"), (40, "NVFP4"), (99, "number 99")]
    {
        let builder = Builder::new().tensor("t", &[256], kind, &[0; 256]);
        assert_says(&parse_error(&builder.bytes()), &["`t`", name, "not supported"]);
    }
}

#[test]
fn rows_are_whole_blocks() {
    for (kind, name, block) in [
        (6, "Q5_0", 32),
        (7, "Q5_1", 32),
        (10, "Q2_K", 256),
        (11, "Q3_K", 256),
        (12, "Q4_K", 256),
        (13, "Q5_K", 256),
        (20, "IQ4_NL", 32),
        (23, "IQ4_XS", 256),
        (39, "MXFP4", 32),
    ] {
        let tensor = |cols: u64| Builder::new().tensor("t", &[cols, 2], kind, &[0; 4096]).bytes();
        let header = header::parse(Path::new("m.gguf"), &tensor(2 * block)).unwrap();
        let dtype = header.tensors[0].dtype;
        assert_eq!(dtype.name(), name);
        assert_eq!(header.tensors[0].data.len(), 4 * dtype.block_bytes());
        let shown = format!("multiples of {block}");
        assert_says(&parse_error(&tensor(block + block / 2)), &["`t`", name, &shown]);
    }
}

#[test]
fn headers_of_other_kinds_are_refused() {
    assert_says(&parse_error(b""), &["m.gguf", "ends within the magic"]);
    assert_says(&parse_error(b"GGML\x03\0\0\0"), &["does not start with GGUF"]);
    let version = |version: u32| {
        let mut builder = Builder::new();
        builder.version = version;
        parse_error(&builder.bytes())
    };
    assert_says(&version(1), &["GGUF version `1`"]);
    assert_says(&version(4), &["GGUF version `4`"]);
    assert_says(&version(3u32.swap_bytes()), &["big-endian"]);
}

#[test]
fn bad_values_are_refused() {
    let error = |builder: Builder| parse_error(&builder.bytes());
    assert_says(&error(Builder::new().key("k", 13, b"")), &["value type 13"]);
    assert_says(&error(Builder::new().key("k", 7, &[2])), &["flag is 2"]);
    assert_says(&error(Builder::new().array("k", 13, 0, b"")), &["array type 13"]);
    assert_says(&error(Builder::new().array("k", 9, 1, &[0; 16])), &["array of arrays"]);
    let twice = Builder::new().u32("k", 1).duplicate_key("k", 4, &[0; 4]);
    assert_says(&error(twice), &["`k`", "twice"]);
    let latin = [&2u64.to_le_bytes()[..], b"\xff\xfe"].concat();
    assert_says(&error(Builder::new().key("k", 8, &latin)), &["not UTF-8"]);
}

#[test]
fn every_scalar_and_array_type_is_read() {
    let scalars: [(u32, &[u8], Value); 12] = [
        (0, &[200], Value::Unsigned(200)),
        (1, &[200], Value::Signed(-56)),
        (2, &[1, 2], Value::Unsigned(0x201)),
        (3, &[0, 128], Value::Signed(-32768)),
        (4, &[1, 0, 0, 128], Value::Unsigned(0x8000_0001)),
        (5, &[255; 4], Value::Signed(-1)),
        (6, &1.5f32.to_le_bytes(), Value::Float(1.5)),
        (7, &[1], Value::Bool(true)),
        (8, &[1, 0, 0, 0, 0, 0, 0, 0, b'x'], Value::String("x".into())),
        (10, &[255; 8], Value::Unsigned(u64::MAX)),
        (11, &[255; 8], Value::Signed(-1)),
        (12, &2.5f64.to_le_bytes(), Value::Float(2.5)),
    ];
    for (kind, bytes, value) in scalars {
        let builder = Builder::new().key("scalar", kind, bytes).array(
            "array",
            kind,
            2,
            &[bytes, bytes].concat(),
        );
        let header = header::parse(Path::new("m.gguf"), &builder.bytes()).unwrap();
        let array = match value.clone() {
            Value::Unsigned(n) => Array::Unsigned(vec![n; 2]),
            Value::Signed(n) => Array::Signed(vec![n; 2]),
            Value::Float(n) => Array::Float(vec![n; 2]),
            Value::Bool(flag) => Array::Bool(vec![flag; 2]),
            Value::String(text) => Array::String(vec![text; 2]),
            Value::Array(array) => array,
        };
        assert_eq!(header.metadata.get("scalar"), Some(&value));
        assert_eq!(header.metadata.get("array"), Some(&Value::Array(array)));
    }
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(128))]

    #[test]
    fn random_bytes_never_panic(bytes in proptest::collection::vec(any::<u8>(), 0..200)) {
        let bytes = [b"GGUF\x03\0\0\0", &bytes[..]].concat();
        let _ = header::parse(Path::new("f"), &bytes);
    }

    /// Mutated headers, counts and lengths among them: refused, or all data within the file.
    #[test]
    fn mutated_files_are_refused_or_in_bounds(
        edits in proptest::collection::vec((any::<prop::sample::Index>(), any::<u8>()), 1..6),
        cut in proptest::option::of(any::<prop::sample::Index>()),
    ) {
        let mut bytes = tiny_with_tokenizer("smollm").bytes();
        // Up to the last tensor's info; its name is the last text in the header.
        let last = b"blk.0.ffn_down.weight";
        let at = bytes.windows(last.len()).rposition(|window| window == last).unwrap();
        let header_len = at + last.len() + 4 + 2 * 8 + 4 + 8;
        for (at, value) in edits {
            bytes[at.index(header_len)] = value;
        }
        if let Some(cut) = cut {
            bytes.truncate(cut.index(bytes.len()));
        }
        let len = bytes.len();
        if let Ok(file) = GgufFile::from_bytes(Path::new("model.gguf"), bytes) {
            for tensor in &file.header.tensors {
                prop_assert!(tensor.data.end <= len);
            }
            let _ = file.tokenizer();
            if let Ok(spec) = file.spec() {
                let _ = file.into_source().map(|source| check_weights(&spec, &source));
            }
        }
    }
}

/// [`tiny`] with a tokenizer: the 256 bytes, four merges, then the special tokens at 260 on.
fn tiny_with_tokenizer(pre: &str) -> Builder {
    let mut tokens: Vec<String> = ByteLevel::alphabet().into_iter().map(String::from).collect();
    tokens.sort();
    tokens.extend(["he", "ll", "hell", "hello"].map(String::from));
    tokens.extend(["<|start|>", "<|end|>", "<|turn|>", "<tool>"].map(String::from));
    let mut types = vec![1; 260];
    types.extend([3, 3, 3, 4]);
    tiny("llama")
        .string("tokenizer.ggml.model", "gpt2")
        .string("tokenizer.ggml.pre", pre)
        .strings("tokenizer.ggml.tokens", &tokens)
        .i32s("tokenizer.ggml.token_type", &types)
        .strings("tokenizer.ggml.merges", &["h e", "l l", "he ll", "hell o"])
        .u32("tokenizer.ggml.bos_token_id", 260)
        .u32("tokenizer.ggml.eos_token_id", 261)
        .u32("tokenizer.ggml.eot_token_id", 262)
}

fn tokenizer(builder: &Builder) -> Result<GgufTokenizer, String> {
    open(builder)?.tokenizer().map_err(|e| e.to_string())
}

#[test]
fn tokenizers_merge_split_specials_and_round_trip() {
    for pre in ["gpt-2", "smollm", "llama-bpe", "qwen2", "default"] {
        let builder = tiny_with_tokenizer(pre).flag("tokenizer.ggml.add_bos_token", false);
        let read = tokenizer(&builder).unwrap();
        assert_eq!((read.bos, &read.eos[..], read.add_bos), (Some(260), &[261, 262][..], false));
        let encode = |text: &str| read.tokenizer.encode(text, true).unwrap().get_ids().to_vec();
        assert_eq!(encode("hello<|end|>hell<tool>he"), [259, 261, 258, 263, 256], "{pre}");
        for text in ["hello hello", "  two\n\n\ttabs  ", "it's 12345 €, naïve 日本 🦀", "<|x|>"]
        {
            assert_eq!(read.tokenizer.decode(&encode(text), true).unwrap(), text, "{pre}");
        }
        let skipped = read.tokenizer.decode(&encode("he<|end|>ll<tool>"), true).unwrap();
        assert_eq!(skipped, "hell<tool>", "{pre}");
    }
}

#[test]
fn pre_tokenizers_split_like_the_models_own() {
    let words = |pre: &str, text: &str| {
        let read = tokenizer(&tiny_with_tokenizer(pre)).unwrap();
        let mut words = tokenizers::PreTokenizedString::from(text);
        read.tokenizer.get_pre_tokenizer().unwrap().pre_tokenize(&mut words).unwrap();
        let splits =
            words.get_splits(tokenizers::OffsetReferential::Original, tokenizers::OffsetType::Byte);
        splits.into_iter().map(|(word, ..)| word.replace('Ġ', " ")).collect::<Vec<_>>()
    };
    assert_eq!(words("gpt-2", "I'M 1234 x!y"), ["I", "'", "M", " 1234", " x", "!", "y"]);
    assert_eq!(words("smollm", "a 123"), ["a", " ", "1", "2", "3"]);
    assert_eq!(words("llama-bpe", "I'M 1234 x!y"), ["I", "'M", " ", "123", "4", " x", "!y"]);
    assert_eq!(words("qwen2", "I'M 12 x!y"), ["I", "'M", " ", "1", "2", " x", "!y"]);
    assert_eq!(words("default", "a=1234"), ["a", "=", "123", "4"]);
}

#[test]
fn bos_is_reported_and_left_to_the_caller() {
    let read = |builder: &Builder| {
        let read = tokenizer(builder).unwrap();
        (read.add_bos, read.tokenizer.encode("hello", true).unwrap().get_ids().to_vec())
    };
    let flagged = tiny_with_tokenizer("smollm").flag("tokenizer.ggml.add_bos_token", true);
    assert_eq!(read(&flagged), (true, vec![259]));
    assert_eq!(read(&tiny_with_tokenizer("smollm")), (false, vec![259]));
    let llama3 = tiny_with_tokenizer("llama-bpe");
    assert_eq!(read(&llama3), (true, vec![259]));
    assert!(!read(&llama3.flag("tokenizer.ggml.add_bos_token", false)).0);
}

#[test]
fn bad_tokenizers_are_refused() {
    let refused = |builder: Builder, parts: &[&str]| {
        assert_says(&tokenizer(&builder).unwrap_err(), parts);
    };
    let good = || tiny_with_tokenizer("smollm");
    refused(good().string("tokenizer.ggml.model", "t5"), &["tokenizer model `t5`"]);
    refused(good().without("tokenizer.ggml.model"), &["`tokenizer.ggml.model`", "missing"]);
    let pre = good().string("tokenizer.ggml.pre", "grok-2");
    refused(pre, &["`tokenizer.ggml.pre`", "pre-tokenizer `grok-2`", "known are default, gpt-2"]);
    refused(good().without("tokenizer.ggml.tokens"), &["`tokenizer.ggml.tokens`", "missing"]);
    refused(good().without("tokenizer.ggml.merges"), &["`tokenizer.ggml.merges`", "missing"]);
    let merges = |merges: &[&str]| good().strings("tokenizer.ggml.merges", merges);
    refused(merges(&["h e", "he"]), &["merges", "`he` at 1"]);
    refused(merges(&["h zz"]), &["merges", "zz"]);
    let twice = good().strings("tokenizer.ggml.tokens", &["a", "b", "a"]);
    refused(twice, &["`a` twice", "0 and 2"]);
    refused(good().i32s("tokenizer.ggml.token_type", &[1]), &["token_type", "264 tokens"]);
    refused(good().u32("tokenizer.ggml.bos_token_id", 264), &["264 tokens", "is 264"]);
    let no_bos = good().without("tokenizer.ggml.bos_token_id");
    let no_bos = no_bos.flag("tokenizer.ggml.add_bos_token", true);
    refused(no_bos, &["bos_token_id", "missing"]);
}

#[test]
fn real_smollm2_opens_and_its_tokenizer_round_trips() {
    let path =
        Path::new(env!("CARGO_MANIFEST_DIR")).join("../models/SmolLM2-135M-Instruct.Q4_1.gguf");
    if !path.exists() {
        eprintln!("skipped: {} is not there", path.display());
        return;
    }
    let file = GgufFile::open(&path).unwrap();
    let spec = file.spec().unwrap();
    println!("{spec:#?}");
    assert_eq!((spec.num_layers, spec.hidden_size, spec.vocab_size), (30, 576, 49152));
    assert_eq!((spec.num_heads, spec.num_kv_heads, spec.head_dim), (9, 3, 64));
    assert!(spec.tie_word_embeddings && spec.rope.theta == 100_000.0);

    let read = file.tokenizer().unwrap();
    assert_eq!((read.bos, &read.eos[..], read.add_bos), (Some(1), &[2][..], false));
    assert!(read.chat_template.unwrap().contains("<|im_start|>"));
    let encode = |text: &str| read.tokenizer.encode(text, true).unwrap().get_ids().to_vec();
    assert_eq!(encode("Hello world"), [19556, 905]);
    assert_eq!(encode("<|im_start|>user\n")[0], 1);
    for text in ["The capital of France is Paris.", "1234 + 5678 = 6912", "naïve 日本 🦀\n\n\tx"]
    {
        assert_eq!(read.tokenizer.decode(&encode(text), true).unwrap(), text);
    }

    let source = file.into_source().unwrap();
    check_weights(&spec, &source).unwrap();
    let mut row = vec![0.0; 576];
    for name in source.names() {
        if source.shape(name).is_some_and(|shape| shape[shape.len() - 1] == 576) {
            source.read_row(name, 0, &mut row).unwrap();
            assert!(row.iter().all(|x| x.is_finite() && x.abs() < 1e3), "{name}");
        }
    }
}
