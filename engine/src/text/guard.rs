//! What keeps a hostile `tokenizer.json` from harming: panics become errors, and normalisers and
//! decoders that could turn a short text into an endless one are recognised.

use serde::Serialize;
use serde_json::Value;
use std::any::Any;
use std::panic::{AssertUnwindSafe, catch_unwind};

/// Most bytes that replacements may make of one byte. Real ones make three (space to `▁`).
pub(super) const MAX_GROWTH: u64 = 64;

/// Calls into the `tokenizers` crate, whose parts check some of their settings by panicking.
pub(super) fn guarded<T>(call: impl FnOnce() -> Result<T, String>) -> Result<T, String> {
    // Nothing of ours is changed by the call, so nothing can be left half-done.
    catch_unwind(AssertUnwindSafe(call)).unwrap_or_else(|panic| Err(message(&*panic)))
}

fn message(panic: &(dyn Any + Send)) -> String {
    let text = panic.downcast_ref::<String>().map(String::as_str);
    let text = text.or(panic.downcast_ref::<&str>().copied()).unwrap_or("no reason given");
    format!("the tokenizer panicked: {text}")
}

/// Whether every precompiled character map in a `tokenizer.json` is as long as it says. The
/// library takes the length of its table from the map itself, unchecked.
pub(super) fn charsmaps_fit(json: &[u8]) -> bool {
    let has_one = |text: &str| text.contains("precompiled_charsmap");
    if !std::str::from_utf8(json).is_ok_and(has_one) {
        return true;
    }
    // What is not JSON is refused by the tokenizer's own parser.
    serde_json::from_slice(json).map_or(true, |value: Value| fits_within(&value["normalizer"]))
}

fn fits_within(normalizer: &Value) -> bool {
    let parts = normalizer["normalizers"].as_array().into_iter().flatten();
    let own = normalizer["precompiled_charsmap"].as_str().is_none_or(charsmap_fits);
    own && parts.into_iter().all(fits_within)
}

/// The first four bytes, little-endian, are the length of the table that follows.
fn charsmap_fits(base64: &str) -> bool {
    let value = |c: u8| match c {
        b'A'..=b'Z' => Some(c - b'A'),
        b'a'..=b'z' => Some(c - b'a' + 26),
        b'0'..=b'9' => Some(c - b'0' + 52),
        b'+' => Some(62),
        b'/' => Some(63),
        _ => None,
    };
    // Six base64 characters hold the four bytes and four bits more.
    let Some(head) = base64.as_bytes().first_chunk::<6>() else { return false };
    let mut bits = 0u64;
    for &c in head {
        let Some(v) = value(c) else { return false };
        bits = bits << 6 | u64::from(v);
    }
    let len = ((bits >> 4) as u32).swap_bytes();
    (len as usize) <= base64.len() / 4 * 3
}

/// Bytes that one byte of text can become through the replacements of a normaliser or decoder.
pub(super) fn growth(part: &impl Serialize) -> u64 {
    // Settings of the parts are private; their serialised form is the documented one.
    serde_json::to_value(part).map_or(u64::MAX, |value| growth_of(&value))
}

fn growth_of(part: &Value) -> u64 {
    let replaced = match part["type"].as_str() {
        Some("Sequence") => {
            let parts = part["normalizers"].as_array().or(part["decoders"].as_array());
            return parts.into_iter().flatten().map(growth_of).fold(1, u64::saturating_mul);
        }
        Some("Replace") => &part["pattern"],
        _ => return 1,
    };
    let content = part["content"].as_str().map_or(0, str::len) as u64;
    // A regular expression may match a single byte, or none at all.
    let pattern = replaced["String"].as_str().map_or(1, str::len) as u64;
    content.checked_div(pattern).unwrap_or(u64::MAX).max(1)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::text::{TextError, Tokenizer, testing};

    /// A byte-level tokenizer's file with one part replaced.
    fn with(part: &str, value: &str) -> Result<Tokenizer, TextError> {
        let json = testing::byte_level_json();
        let mut file: Value = serde_json::from_str(&json).expect("JSON");
        file[part] = serde_json::from_str(value).expect("JSON");
        let dir = std::env::temp_dir().join(format!("quire-guard-{part}-{}", value.len()));
        std::fs::write(&dir, file.to_string()).expect("written");
        let result = Tokenizer::from_file(&dir);
        std::fs::remove_file(&dir).expect("removed");
        result
    }

    #[test]
    fn parts_that_panic_are_errors() {
        for (part, value) in [
            ("normalizer", r#"{"type":"Precompiled","precompiled_charsmap":"AAAA"}"#),
            ("pre_tokenizer", r#"{"type":"FixedLength","length":0}"#),
            (
                "post_processor",
                r#"{"type":"TemplateProcessing","single":[{"SpecialToken":{"id":"nope",
                    "type_id":0}}],"pair":[],"special_tokens":{}}"#,
            ),
        ] {
            let error = match with(part, value) {
                Err(error) => error,
                Ok(tokenizer) => tokenizer.encode("hello", true).expect_err(part),
            };
            assert!(!error.to_string().is_empty(), "{part}");
        }
    }

    #[test]
    fn a_character_map_that_claims_gigabytes_is_refused() {
        let map = |map: &str| format!(r#"{{"type":"Precompiled","precompiled_charsmap":"{map}"}}"#);
        let within = |part: &str| format!(r#"{{"type":"Sequence","normalizers":[{part}]}}"#);
        // 0xFFFF_FFFF, and four bytes of table with four to come.
        for bad in ["/////wAAAAA=", "CAAAAAAAAAA="] {
            assert_eq!(charsmap_fits(bad), bad.starts_with('C'), "{bad}");
        }
        for bad in [map("/////wAAAAA="), within(&map("/////wAAAAA="))] {
            let refused = matches!(with("normalizer", &bad), Err(TextError::Parse { .. }));
            assert!(refused, "{bad}");
        }
        assert!(!charsmap_fits("") && !charsmap_fits("AAAA"));
    }

    #[test]
    fn replacements_that_multiply_text_are_refused() {
        let replace = |pattern: &str, times: usize| {
            let content = "a".repeat(times);
            format!(r#"{{"type":"Replace","pattern":{pattern},"content":"{content}"}}"#)
        };
        let twice = |part: &str| format!(r#"{{"type":"Sequence","normalizers":[{part},{part}]}}"#);
        for bad in [
            replace(r#"{"String":"a"}"#, 65),
            replace(r#"{"Regex":"a+"}"#, 65),
            replace(r#"{"String":""}"#, 1),
            twice(&replace(r#"{"String":"a"}"#, 9)),
        ] {
            let refused =
                matches!(with("normalizer", &bad), Err(TextError::NormaliserGrowth { .. }));
            assert!(refused, "{bad}");
            let decoder = bad.replace("normalizers", "decoders");
            let refused =
                matches!(with("decoder", &decoder), Err(TextError::NormaliserGrowth { .. }));
            assert!(refused, "{decoder}");
        }
        assert!(with("normalizer", &replace(r#"{"String":" "}"#, 3)).is_ok());
        assert!(with("normalizer", &twice(&replace(r#"{"String":"ab"}"#, 16))).is_ok());
    }
}
