//! Hand-built files, most of them hostile, and mutated ones.

use std::fs;

use proptest::prelude::*;
use serde_json::json;
use tempfile::TempDir;

use super::*;

fn file_bytes(header: &[u8], data: &[u8]) -> Vec<u8> {
    [&(header.len() as u64).to_le_bytes()[..], header, data].concat()
}

fn floats(values: &[f32]) -> Vec<u8> {
    values.iter().flat_map(|v| v.to_le_bytes()).collect()
}

/// A file of two tensors: `a` = [[0, 1, 2], [3, 4, 5]] in F32, `b` = [1, -2] in BF16.
fn good_file() -> Vec<u8> {
    let header = json!({
        "__metadata__": {"format": "pt"},
        "b": {"dtype": "BF16", "shape": [2], "data_offsets": [24, 28]},
        "a": {"dtype": "F32", "shape": [2, 3], "data_offsets": [0, 24]},
    });
    let mut data = floats(&[0.0, 1.0, 2.0, 3.0, 4.0, 5.0]);
    data.extend([0x80, 0x3f, 0x00, 0xc0]);
    file_bytes(header.to_string().as_bytes(), &data)
}

fn header_error(bytes: &[u8]) -> String {
    parse_header(Path::new("dir/model.safetensors"), bytes).unwrap_err().to_string()
}

fn tensor_error(header: serde_json::Value, data_len: usize) -> String {
    header_error(&file_bytes(header.to_string().as_bytes(), &vec![0; data_len]))
}

#[track_caller]
fn assert_says(message: &str, parts: &[&str]) {
    for part in parts {
        assert!(message.contains(part), "{message:?} lacks {part:?}");
    }
}

#[test]
fn rows_are_read_as_f32() {
    let dir = TempDir::new().unwrap();
    fs::write(dir.path().join(SINGLE_FILE), good_file()).unwrap();
    let source = SafetensorsSource::open(dir.path()).unwrap();
    assert_eq!(source.names(), ["a", "b"]);
    assert_eq!(source.shape("a"), Some(&[2, 3][..]));
    assert_eq!(source.dtype("b"), Some(SourceDtype::Bf16));
    assert_eq!((source.shape("c"), source.dtype("c")), (None, None));
    let mut row = [0.0; 3];
    source.read_row("a", 1, &mut row).unwrap();
    assert_eq!(row, [3.0, 4.0, 5.0]);
    source.read_row("b", 0, &mut row[..2]).unwrap();
    assert_eq!(row, [1.0, -2.0, 5.0]);
}

#[test]
fn bad_row_requests_are_errors() {
    let dir = TempDir::new().unwrap();
    fs::write(dir.path().join(SINGLE_FILE), good_file()).unwrap();
    let source = SafetensorsSource::open(dir.path()).unwrap();
    let error =
        |name, row, len| source.read_row(name, row, &mut vec![0.0; len]).unwrap_err().to_string();
    assert_says(&error("a", 2, 3), &[SINGLE_FILE, "`a`", "row 2", "there are 2"]);
    assert_says(&error("a", 0, 4), &["`a`", "3 elements", "output has 4"]);
    assert_says(&error("b", 1, 2), &["`b`", "row 1"]);
    assert_says(&error("c", 0, 1), &["`c`", "does not exist"]);
}

#[test]
fn x1_header_length_over_any_limit_is_refused() {
    for length in [1 << 63, u64::MAX, MAX_HEADER_BYTES + 1] {
        let bytes = [&length.to_le_bytes()[..], b"{}"].concat();
        assert_says(&header_error(&bytes), &[&length.to_string(), "100000000"]);
    }
    let over_file = [&3u64.to_le_bytes()[..], b"{}"].concat();
    assert_says(&header_error(&over_file), &["model.safetensors", "is 3; the limit is 2"]);
    assert_says(&header_error(b""), &["has 0 bytes"]);
    assert_says(&header_error(b"1234567"), &["has 7 bytes"]);
}

#[test]
fn x2_offsets_that_disagree_are_refused_naming_the_tensor() {
    let two = |a: [i64; 2], b: [i64; 2]| {
        let header = json!({
            "a": {"dtype": "F32", "shape": [2], "data_offsets": a},
            "b": {"dtype": "F32", "shape": [2], "data_offsets": b},
        });
        tensor_error(header, 16)
    };
    assert_says(&two([0, 8], [4, 12]), &["`b`", "[4, 12]", "overlap"]);
    assert_says(&two([0, 8], [0, 8]), &["overlap"]);
    assert_says(&two([0, 8], [12, 16]), &["`b`", "gap after 8"]);
    assert_says(&two([4, 12], [12, 16]), &["`a`", "gap after 0"]);
    assert_says(&two([8, 0], [8, 16]), &["`a`", "[8, 0]", "reversed"]);
    assert_says(&two([-8, 0], [0, 8]), &["`a`", "-8"]);
    assert_says(&two([0, 8], [8, 24]), &["`b`", "end at 24", "16 bytes"]);
    assert_says(&two([0, 8], [8, i64::MAX]), &["`b`", "end at 9223372036854775807"]);
}

#[test]
fn x2_shape_and_offsets_must_agree() {
    let one = |shape: &[u64], end: u64| {
        let header = json!({"a": {"dtype": "F32", "shape": shape, "data_offsets": [0, end]}});
        tensor_error(header, end as usize)
    };
    assert_says(&one(&[3], 8), &["`a`", "[3]", "12 bytes", "give 8"]);
    assert_says(&one(&[1 << 62, 1 << 62], 8), &["`a`", "overflows"]);
    assert_says(&one(&[0, 5], 8), &["`a`", "0 bytes"]);
}

#[test]
fn x5_header_must_be_utf8_json_with_unique_names() {
    assert_says(&header_error(&file_bytes(b"{\"\xff\":1}", b"")), &["not UTF-8 at byte 2"]);
    for text in ["", "{", "[]", "1", "{} x", "{\"a\":1}", "{\"a\":{\"dtype\":\"F32\"}}"] {
        assert_says(&header_error(&file_bytes(text.as_bytes(), b"")), &["header cannot be read"]);
    }
    let info = r#"{"dtype":"F32","shape":[0],"data_offsets":[0,0]}"#;
    let twice = format!(r#"{{"w":{info},"w":{info}}}"#);
    assert_says(&header_error(&file_bytes(twice.as_bytes(), b"")), &["`w` is there twice"]);
    let deep = "[".repeat(100_000);
    assert_says(&header_error(&file_bytes(deep.as_bytes(), b"")), &["header cannot be read"]);
    let deep = format!("{{\"a\":{}", "{\"a\":".repeat(100_000));
    assert_says(&header_error(&file_bytes(deep.as_bytes(), b"")), &["header cannot be read"]);
}

#[test]
fn unknown_and_unsupported_types_are_refused_by_name() {
    let of = |dtype: &str, bytes: u64| {
        let header = json!({"w": {"dtype": dtype, "shape": [2], "data_offsets": [0, bytes]}});
        tensor_error(header, bytes as usize)
    };
    assert_says(&of("F12", 3), &["`w`", "F12"]);
    assert_says(&of("f32", 8), &["`w`", "f32"]);
    assert_says(&of("I64", 16), &["`w`", "I64", "not supported"]);
    assert_says(&of("F8_E4M3", 2), &["`w`", "F8_E4M3", "not supported"]);
}

#[test]
fn x6_short_and_long_files_are_refused() {
    let mut bytes = good_file();
    bytes.push(0);
    assert_says(&header_error(&bytes), &["1 bytes follow the last tensor"]);
    bytes.truncate(bytes.len() - 2);
    assert_says(&header_error(&bytes), &["`b`", "end at 28", "holds 27 bytes"]);
}

/// A folder of two shards, `one` with tensor `x`, `two` with tensor `y`, and the given index.
fn sharded(index: &str) -> TempDir {
    let dir = TempDir::new().unwrap();
    for (file, tensor, value) in [("one", "x", 1.0), ("two", "y", 2.0)] {
        let header = json!({tensor: {"dtype": "F32", "shape": [1], "data_offsets": [0, 4]}});
        let bytes = file_bytes(header.to_string().as_bytes(), &floats(&[value]));
        fs::write(dir.path().join(file), bytes).unwrap();
    }
    fs::write(dir.path().join(INDEX_FILE), index).unwrap();
    dir
}

fn index_error(index: &str) -> String {
    let dir = sharded(index);
    SafetensorsSource::open(dir.path()).err().expect("the folder is bad").to_string()
}

#[test]
fn weight_map_decides_the_shard() {
    let dir = sharded(r#"{"metadata": {"total_size": 8}, "weight_map": {"x": "one", "y": "two"}}"#);
    let source = SafetensorsSource::open(dir.path()).unwrap();
    let mut value = [0.0];
    source.read_row("y", 0, &mut value).unwrap();
    assert_eq!(value, [2.0]);
    assert!(source.location("y").ends_with("two"));
    assert_eq!(source.location("z"), dir.path().display().to_string());
}

#[test]
fn index_and_shards_must_agree() {
    let missing_shard = index_error(r#"{"weight_map": {"x": "one", "y": "three"}}"#);
    assert_says(&missing_shard, &[INDEX_FILE, "`three`", "missing"]);
    let missing_tensor = index_error(r#"{"weight_map": {"x": "one", "y": "two", "z": "two"}}"#);
    assert_says(&missing_tensor, &["two: tensor `z`", "it is not"]);
    let wrong_shard = index_error(r#"{"weight_map": {"x": "two", "y": "two"}}"#);
    assert_says(&wrong_shard, &["two", "`x`"]);
    let swapped = index_error(r#"{"weight_map": {"x": "two", "y": "one"}}"#);
    assert_says(&swapped, &["one: tensor `x`", "not so in"]);
    let extra = index_error(r#"{"weight_map": {"x": "one", "w": "two"}}"#);
    assert_says(&extra, &["two: tensor `y`", "not so in"]);
    let twice = index_error(r#"{"weight_map": {"x": "one", "y": "two", "x": "one"}}"#);
    assert_says(&twice, &[INDEX_FILE, "`x` is there twice"]);
}

#[test]
fn index_must_be_json_with_a_weight_map() {
    for index in ["", "[]", "{}", r#"{"weight_map": []}"#, r#"{"weight_map": {"x": 1}}"#] {
        assert_says(&index_error(index), &[INDEX_FILE, "cannot be read"]);
    }
    let shards: HashMap<String, String> =
        (0..=MAX_SHARDS).map(|i| (i.to_string(), i.to_string())).collect();
    let many = index_error(&json!({"weight_map": shards}).to_string());
    assert_says(&many, &["number of shards is 4097; the limit is 4096"]);
}

#[test]
fn x7_shards_outside_the_folder_are_refused() {
    for file in ["../x", "/etc/passwd", "sub/../one", "..", "", "a\\\\..\\\\x"] {
        let error = index_error(&format!(r#"{{"weight_map": {{"x": "{file}"}}}}"#));
        assert_says(&error, &["plain file name"]);
    }
}

#[cfg(unix)]
#[test]
fn x7_a_link_out_of_the_folder_is_refused() {
    let outside = sharded("{}");
    let dir = TempDir::new().unwrap();
    std::os::unix::fs::symlink(outside.path().join("one"), dir.path().join(SINGLE_FILE)).unwrap();
    let error = SafetensorsSource::open(dir.path()).err().expect("links out").to_string();
    assert_says(&error, &[SINGLE_FILE, "link out of the model folder"]);
}

#[test]
fn a_folder_without_weights_says_what_it_looked_for() {
    let dir = TempDir::new().unwrap();
    let error = SafetensorsSource::open(dir.path()).err().expect("is empty").to_string();
    assert_says(&error, &[SINGLE_FILE, INDEX_FILE]);
    assert!(SafetensorsSource::open(&dir.path().join("nowhere")).is_err());
}

proptest! {
    #[test]
    fn random_bytes_never_panic(bytes in proptest::collection::vec(any::<u8>(), 0..200)) {
        let _ = parse_header(Path::new("f"), &bytes);
    }

    /// Whatever a mutation does, an accepted header's tensors lie within the file.
    #[test]
    fn mutated_files_are_refused_or_in_bounds(
        edits in proptest::collection::vec((any::<prop::sample::Index>(), any::<u8>()), 1..4),
        cut in any::<prop::sample::Index>(),
        is_cut in any::<bool>(),
    ) {
        let mut bytes = good_file();
        for (at, value) in edits {
            let at = at.index(bytes.len());
            bytes[at] = value;
        }
        if is_cut {
            bytes.truncate(cut.index(bytes.len()));
        }
        for tensor in parse_header(Path::new("f"), &bytes).into_iter().flatten() {
            let elements: usize = tensor.shape.iter().product();
            prop_assert!(tensor.data.end <= bytes.len());
            prop_assert_eq!(tensor.data.len(), elements * tensor.dtype.block_bytes());
        }
    }
}
