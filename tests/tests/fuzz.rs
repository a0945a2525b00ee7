//! Random input in place of a model's files and a request's messages: nothing panics, everything
//! ends within its limits, and two ways to the same result agree.

use proptest::prelude::*;
use proptest::sample::{Index, select};
use proptest::test_runner::{TestCaseError, TestRunner};
use quire_engine::text::chat::{
    ChatError, ChatMessage, ChatTemplate, ChatTemplateOptions, MAX_PROMPT_BYTES, RenderOptions,
    control_tokens,
};
use quire_engine::text::{Detokenizer, TextError, Tokenizer};
use quire_tests::fixtures::{byte_level, data_dir};
use serde_json::{Value, json};
use std::cell::Cell;
use std::time::{Duration, Instant, UNIX_EPOCH};

/// Far more than any of this takes at its limits, on a busy machine.
const PATIENCE: Duration = Duration::from_secs(10);

fn config(cases: u32) -> ProptestConfig {
    ProptestConfig { cases, failure_persistence: None, ..Default::default() }
}

// ---- Chat templates ------------------------------------------------------------------------

/// Pieces between blanks; some more are added where they are used.
const SOUP: &str = "{{ }} {% %} {%- -%} {# #} if elif else endif for in endfor set endset macro \
    endmacro call endcall filter endfilter raw endraw generation endgeneration break continue \
    recursive with endwith block endblock include extends autoescape do messages m x n.x loop \
    namespace( range(9999) ( ) [ ] { } , : . | ~ + - * ** / // % = == != < > <= and or not is \
    defined none true 'a' \" ' \\ 1 99999999999999999999 1e999 0x tojson length é \u{E000} \u{0}";

/// Values, between blanks.
const LEAVES: &str = "messages messages[0] m m.content x n.x n loop loop.index0 tools bos_token \
    nothing 'ab' '%s-%s' '' 0 7 -1 1.5 true none [] {} 9223372036854775807 range(9999) \
    strftime_now('%Y') namespace(x=1)";

/// What stands between two values.
const OPERATORS: &str = "+ - * / // % ** ~ == != < >= and or in";

/// What a value may be asked to be.
const TESTS: &str = "defined none string mapping iterable number true odd";

/// What stands behind a value.
const SUFFIXES: &str = "|tojson |tojson(indent=4) |list |join |join(',') |upper |length |first \
    |last |sort |unique |map(attribute='role') |map('upper') |select |sum |reverse |indent(4) \
    |replace('a','bb') |trim |string |int |float |abs |default('d') |items |dictsort |batch(2) \
    |slice(2) |max |min |round |selectattr('role','equalto','user') |groupby('role') |capitalize \
    |title |e .x .role [0] [-1] [1:] [::-1] [:99999999999] ['role'] .items() .keys() .strip() \
    .split('a') .startswith('a') .upper() .get('a') () .join(['a','b']) .replace('','xy')";

/// One of the pieces between blanks.
fn one_of(list: &'static str) -> impl Strategy<Value = &'static str> {
    select(list.split(' ').filter(|piece| !piece.is_empty()).collect::<Vec<_>>())
}

/// An expression that parses and may mean something.
fn expression() -> BoxedStrategy<String> {
    let leaf = one_of(LEAVES).prop_map(str::to_owned);
    leaf.prop_recursive(2, 8, 2, |inner| {
        let two = (inner.clone(), inner.clone());
        prop_oneof![
            3 => (inner.clone(), one_of(SUFFIXES)).prop_map(|(a, suffix)| format!("({a}){suffix}")),
            2 => (two.clone(), one_of(OPERATORS)).prop_map(|((a, b), o)| format!("({a} {o} {b})")),
            1 => two.clone().prop_map(|(a, b)| format!("[{a}, {b}]")),
            1 => two.clone().prop_map(|(a, b)| format!("{{'k': {a}, 'l': {b}}}")),
            1 => two.prop_map(|(a, b)| format!("({a} if {b} else {b})")),
            1 => (inner, one_of(TESTS)).prop_map(|(a, test)| format!("({a} is {test})")),
        ]
    })
    .boxed()
}

/// Tags that fit together, around an expression and a body.
const BLOCKS: &[&str] = &[
    "{% for m in EXPR %}BODY{% endfor %}",
    "{% for m in [EXPR, messages] %}BODY{% if EXPR %}{% break %}{% endif %}x{% endfor %}",
    "{% for m in messages if EXPR %}BODY{% else %}none{% endfor %}",
    "{% for m in [1, [2, 3]] recursive %}BODY{% if m is iterable %}{{ loop(m) }}{% endif %}\
     {% endfor %}",
    "{% if EXPR %}BODY{% elif x %}y{% else %}no{% endif %}",
    "{% macro f(x) %}BODY{{ caller() if caller }}{% endmacro %}",
    "{% call f(EXPR) %}BODY{% endcall %}",
    "{% set x %}BODY{% endset %}",
    "{% filter upper %}BODY{% endfilter %}",
    "{% generation %}BODY{% endgeneration %}",
];

/// The same without a body.
const STATEMENTS: &[&str] = &[
    "{{ EXPR }}",
    "{{ EXPR }}",
    "{%- set n.x = EXPR -%}",
    "{% set x = EXPR %}",
    "{{ f(EXPR) }}",
    "text\n",
    "{# c #}",
    "{% if EXPR %}{{ raise_exception(x) }}{% endif %}",
];

/// A template that compiles as a rule, and often makes a text.
fn template() -> BoxedStrategy<String> {
    let leaf = (select(STATEMENTS), expression()).prop_map(|(s, e)| s.replace("EXPR", &e));
    let body = leaf.prop_recursive(4, 24, 3, |inner| {
        let inner = prop::collection::vec(inner, 0..4).prop_map(|parts| parts.concat());
        (select(BLOCKS), expression(), inner)
            .prop_map(|(block, e, body)| block.replace("EXPR", &e).replace("BODY", &body))
    });
    let start = "{% set n = namespace(x=1) %}{% macro f(x) %}{{ x }}{% endmacro %}{% set x = 2 %}";
    let parts = prop::collection::vec(body, 1..5);
    parts.prop_map(move |parts| [start, &parts.concat()].concat()).boxed()
}

fn render(source: &str) -> Result<String, ChatError> {
    let options = ChatTemplateOptions {
        special_tokens: [("bos_token".into(), "<s>".into())].into(),
        control_tokens: vec!["<s>".into(), "text".into()],
    };
    let template = ChatTemplate::new(source, options)?;
    let messages = [ChatMessage::new("user", "<s> hi"), ChatMessage::new("assistant", "ab")];
    let now = UNIX_EPOCH + Duration::from_secs(1_721_984_703);
    let options = RenderOptions { now, ..Default::default() };
    Ok(template.render(&messages, &options)?.text().to_owned())
}

/// Renders twice, within the limits; whether there was a text.
fn check_template(source: &str) -> Result<bool, TestCaseError> {
    let start = Instant::now();
    let result = render(source);
    prop_assert!(start.elapsed() < PATIENCE, "{:?}", start.elapsed());
    match &result {
        Ok(text) => prop_assert!(text.len() <= MAX_PROMPT_BYTES),
        Err(error) => prop_assert!(!error.to_string().contains("panicked"), "{}", error),
    }
    prop_assert_eq!(format!("{:?}", result), format!("{:?}", render(source)));
    Ok(result.is_ok())
}

#[test]
fn any_sequence_of_tags_ends() {
    let parts = prop::collection::vec(one_of(SOUP), 0..40);
    let strategy = (parts, select(vec![" ", ""]));
    let run = |(parts, space): (Vec<&str>, &str)| check_template(&parts.join(space)).map(drop);
    TestRunner::new(config(1000)).run(&strategy, run).unwrap();
}

#[test]
fn any_template_ends() {
    let num_rendered = Cell::new(0);
    let run = |source: String| {
        num_rendered.set(num_rendered.get() + usize::from(check_template(&source)?));
        Ok(())
    };
    TestRunner::new(config(1500)).run(&template(), run).unwrap();
    assert!(num_rendered.get() > 150, "only {} templates made a text", num_rendered.get());
}

// ---- Messages ------------------------------------------------------------------------------

const KEYS: &str = "role content type text name tool_calls function arguments id tool_call_id \
    reasoning_content refusal x";

/// Any JSON, mostly of the keys and texts that messages have.
fn any_json() -> BoxedStrategy<Value> {
    let texts = select(vec!["user", "text", "refusal", "{\"x\": 1}", "{", "", "<s>", "\u{0}é"]);
    let leaf = prop_oneof![
        3 => texts.prop_map(Value::from),
        1 => select(vec![json!(null), json!(true), json!(-1), json!(1e300), json!(u64::MAX)]),
        1 => any::<String>().prop_map(Value::from),
    ];
    leaf.prop_recursive(5, 40, 5, |inner| {
        let fields = prop::collection::vec((one_of(KEYS), inner.clone()), 0..5);
        prop_oneof![
            prop::collection::vec(inner, 0..5).prop_map(Value::Array),
            fields.prop_map(|f| Value::Object(f.into_iter().map(|(k, v)| (k.into(), v)).collect())),
        ]
    })
    .boxed()
}

/// A message that is right but for at most one field.
fn any_message() -> BoxedStrategy<Value> {
    let content = select(vec![
        json!("hi"),
        json!(null),
        json!([{"type": "text", "text": "42"}, "43"]),
        json!([]),
    ]);
    let calls = select(vec![
        json!(null),
        json!([{"id": "1", "function": {"name": "f", "arguments": "{\"x\": 1}"}}]),
        json!([{"function": {"name": "f", "arguments": {"x": [1]}}}]),
    ]);
    let roles = select(vec!["system", "user", "assistant", "tool", "odd"]);
    let wrong = prop::option::weighted(0.3, (one_of(KEYS), any_json()));
    (roles, content, calls, wrong)
        .prop_map(|(role, content, calls, wrong)| {
            let mut message = json!({"role": role, "content": content, "tool_calls": calls});
            if let Some((key, value)) = wrong {
                message[key] = value;
            }
            message
        })
        .boxed()
}

#[test]
fn any_messages_are_read_or_refused_by_place() {
    let path = data_dir().join("chat/templates/im-tools.jinja");
    let source = std::fs::read_to_string(path).expect("a recorded template");
    let template = ChatTemplate::new(&source, ChatTemplateOptions::default()).expect("it compiles");
    let messages = prop::collection::vec(any_message(), 0..5).prop_map(Value::Array);
    let strategy = prop_oneof![1 => any_json(), 3 => messages];
    let num_rendered = Cell::new(0);
    let run = |json: Value| {
        let list = match ChatMessage::list_from_json(&json) {
            Ok(list) => list,
            Err(error) => {
                prop_assert!(error.to_string().starts_with("messages"), "{error}");
                return Ok(());
            }
        };
        // A list is read as its messages are.
        let items = json.as_array().expect("a list was read");
        prop_assert_eq!(items.len(), list.len());
        for (i, (item, message)) in items.iter().zip(&list).enumerate() {
            prop_assert_eq!(&ChatMessage::from_json(i, item).expect("read above"), message);
        }
        match template.render(&list, &RenderOptions::default()) {
            Ok(_) => num_rendered.set(num_rendered.get() + 1),
            Err(error) => prop_assert!(!error.to_string().contains("panicked"), "{error}"),
        }
        Ok(())
    };
    TestRunner::new(config(1500)).run(&strategy, run).unwrap();
    assert!(num_rendered.get() > 60, "only {} conversations were rendered", num_rendered.get());
}

// ---- Tokenizers ----------------------------------------------------------------------------

/// Parts of a `tokenizer.json`, each of a kind that models use.
fn parts() -> Vec<(&'static str, Value)> {
    let metaspace = json!({"type": "Metaspace", "replacement": "▁", "prepend_scheme": "first",
        "split": false});
    let replace = json!({"type": "Replace", "pattern": {"String": "▁"}, "content": " "});
    let lowercase = json!({"type": "Lowercase"});
    let regex = json!({"type": "Replace", "pattern": {"Regex": " +"}, "content": "▁"});
    let single = json!([{"SpecialToken": {"id": "<bos>", "type_id": 0}},
        {"Sequence": {"id": "A", "type_id": 0}}]);
    let bos = json!({"<bos>": {"id": "<bos>", "ids": [258], "tokens": ["<bos>"]}});
    let split = json!({"type": "Split", "pattern": {"Regex": "\\p{L}+|\\s"},
        "behavior": "Isolated", "invert": false});
    vec![
        ("normalizer", json!({"type": "Sequence", "normalizers": [{"type": "NFC"}, regex]})),
        ("normalizer", lowercase),
        ("pre_tokenizer", metaspace.clone()),
        ("pre_tokenizer", json!({"type": "Sequence", "pretokenizers": [split]})),
        (
            "post_processor",
            json!({"type": "TemplateProcessing", "single": single, "pair": single,
                "special_tokens": bos}),
        ),
        ("decoder", metaspace),
        (
            "decoder",
            json!({"type": "Sequence", "decoders": [replace, {"type": "ByteFallback"},
                {"type": "Fuse"}, {"type": "Strip", "content": " ", "start": 1, "stop": 0}]}),
        ),
        ("decoder", json!({"type": "WordPiece", "prefix": "##", "cleanup": true})),
        ("decoder", json!({"type": "BPEDecoder", "suffix": "</w>"})),
        ("decoder", json!(null)),
    ]
}

/// One change to a node of the file.
#[derive(Clone, Debug)]
enum Change {
    /// Puts a value there.
    Put(Value),
    /// Takes it out of its object or list.
    Remove,
    /// Puts another node there.
    Copy(Index),
}

fn change() -> impl Strategy<Value = (Index, Change)> {
    let numbers = [json!(null), json!(true), json!(0), json!(-1), json!(1.5), json!(u32::MAX)];
    let lists = [json!(u64::MAX), json!([]), json!({}), json!([[]]), json!("")];
    let texts = "a (a+)+b [ é▁ AAAA Strip Precompiled BertNormalizer FixedLength WordLevel Unigram";
    let texts = texts.split(' ').map(Value::from);
    let values = select(numbers.into_iter().chain(lists).chain(texts).collect::<Vec<_>>());
    let change = prop_oneof![
        4 => values.prop_map(Change::Put),
        2 => Just(Change::Remove),
        1 => any::<Index>().prop_map(Change::Copy),
    ];
    (any::<Index>(), change)
}

/// JSON pointers of all nodes, but only the first few entries of long lists and objects.
fn pointers(value: &Value, at: &str, out: &mut Vec<String>) {
    let children: Vec<(String, &Value)> = match value {
        Value::Array(items) => items.iter().enumerate().map(|(i, v)| (i.to_string(), v)).collect(),
        Value::Object(fields) => {
            fields.iter().map(|(k, v)| (k.replace('~', "~0").replace('/', "~1"), v)).collect()
        }
        _ => return,
    };
    for (key, child) in children.into_iter().take(12) {
        let at = format!("{at}/{key}");
        pointers(child, &at, out);
        out.push(at);
    }
}

fn apply(file: &mut Value, (at, change): &(Index, Change)) {
    let mut all = Vec::new();
    pointers(file, "", &mut all);
    if all.is_empty() {
        return;
    }
    let at = at.get(&all);
    let value = match change {
        Change::Put(value) => value.clone(),
        Change::Copy(from) => file.pointer(from.get::<String>(&all)).expect("a node").clone(),
        Change::Remove => {
            let (parent, key) = at.rsplit_once('/').expect("below the root");
            match file.pointer_mut(parent).expect("a node") {
                Value::Array(items) => drop(items.remove(key.parse().expect("an index"))),
                Value::Object(fields) => drop(fields.remove(key)),
                _ => unreachable!("a leaf has no children"),
            }
            return;
        }
    };
    *file.pointer_mut(at).expect("a node") = value;
}

fn from_text(text: &[u8]) -> Result<Tokenizer, TextError> {
    let folder = tempfile::tempdir().expect("a folder for temporary files");
    let path = folder.path().join("tokenizer.json");
    std::fs::write(&path, text).expect("written");
    Tokenizer::from_file(&path)
}

/// Encodes and decodes with whatever was loaded: no panic, and the deltas are the whole.
fn check_tokenizer(tokenizer: &Tokenizer) -> Result<(), TestCaseError> {
    for text in ["Hey <bos> é ab\u{0} ▁x  ", ""] {
        for add_special in [true, false] {
            let mut ids = tokenizer.encode(text, add_special).unwrap_or_default();
            ids.extend([0, 1, 200, 255, 256, 258, u32::MAX]);
            for skip_special in [true, false] {
                let Ok(whole) = tokenizer.decode(&ids, skip_special) else { continue };
                let mut detokenizer = Detokenizer::new(tokenizer.clone(), skip_special);
                let mut joined = String::new();
                for &id in &ids {
                    joined +=
                        &detokenizer.push(id).map_err(|e| TestCaseError::fail(e.to_string()))?;
                }
                joined += &detokenizer.finish().map_err(|e| TestCaseError::fail(e.to_string()))?;
                prop_assert_eq!(joined, whole);
            }
        }
    }
    for token in control_tokens(tokenizer) {
        let id = tokenizer.token_to_id(&token);
        prop_assert!(id.is_some_and(|id| tokenizer.is_special(id)), "{token:?} is not special");
    }
    Ok(())
}

#[test]
fn any_tokenizer_file_is_refused_or_works() {
    let base = byte_level(&[("a", "b"), ("Ġ", "ab")]).to_string(false).expect("serialises");
    let base: Value = serde_json::from_str(&base).expect("JSON");
    let parts = prop::collection::vec(select(parts()), 0..4);
    let changes = prop::collection::vec(change(), 0..4);
    let cut = prop::option::weighted(0.1, (any::<Index>(), any::<u8>()));
    let num_loaded = Cell::new(0);
    let run = |(parts, changes, cut): (Vec<_>, Vec<_>, Option<(Index, u8)>)| {
        let mut file = base.clone();
        for (part, value) in parts {
            file[part] = value;
        }
        changes.iter().for_each(|change| apply(&mut file, change));
        let mut text = file.to_string().into_bytes();
        if let Some((at, byte)) = cut {
            let at = at.index(text.len());
            text[at] = byte;
        }
        let start = Instant::now();
        if let Ok(tokenizer) = from_text(&text) {
            num_loaded.set(num_loaded.get() + 1);
            check_tokenizer(&tokenizer)?;
        }
        prop_assert!(start.elapsed() < PATIENCE, "{:?}", start.elapsed());
        Ok(())
    };
    TestRunner::new(config(2000)).run(&(parts, changes, cut), run).unwrap();
    assert!(num_loaded.get() > 100, "only {} files were loaded", num_loaded.get());
}

/// The largest id there can be costs no more than others.
#[test]
fn a_file_may_claim_an_id_near_2_to_32() {
    let mut file: Value =
        serde_json::from_str(&byte_level(&[]).to_string(false).expect("serialises")).expect("JSON");
    file["model"]["vocab"]["far away"] = json!(u32::MAX - 1);
    let start = Instant::now();
    let tokenizer = from_text(file.to_string().as_bytes()).expect("it is a tokenizer");
    assert_eq!(control_tokens(&tokenizer), ["<bos>", "<eos>"]);
    assert!(start.elapsed() < PATIENCE, "{:?}", start.elapsed());
}
