//! The stop matcher against a naive one, however the text is cut.

#![no_main]

use libfuzzer_sys::fuzz_target;
use quire_engine::text::StopMatcher;

/// The text before the stop string that ends first.
fn naive<'a>(text: &'a str, stops: &[String]) -> Option<&'a str> {
    let ends = stops.iter().filter_map(|s| Some((text.find(s.as_str())? + s.len(), s.len())));
    let (end, _) = ends.min_by_key(|&(end, len)| (end, std::cmp::Reverse(len)))?;
    let longest = stops.iter().filter(|s| text[..end].ends_with(s.as_str()));
    let len = longest.map(String::len).max().unwrap_or(0);
    Some(&text[..end - len])
}

fuzz_target!(|input: (Vec<String>, Vec<String>)| {
    let (mut stops, pieces) = input;
    stops.retain(|s| !s.is_empty());
    stops.truncate(8);
    let text = pieces.concat();
    let mut matcher = StopMatcher::new(&stops, false);
    let (mut emitted, mut matched) = (String::new(), false);
    for piece in &pieces {
        let result = matcher.push(piece);
        emitted.push_str(&result.emit);
        matched |= result.matched.is_some();
    }
    emitted.push_str(&matcher.finish());
    match naive(&text, &stops) {
        Some(before) => assert_eq!((emitted.as_str(), matched), (before, true)),
        None => assert_eq!((emitted, matched), (text, false)),
    }
});
