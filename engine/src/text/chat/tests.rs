//! Hostile templates and requests; what templates render is compared with Jinja2's in `tests/`.

use std::time::{Duration, Instant};

use serde_json::json;

use super::*;

/// Far more than a bounded template needs, in a build without optimisation on a busy machine.
const PATIENCE: Duration = Duration::from_secs(10);

fn template(source: &str) -> ChatTemplate {
    ChatTemplate::new(source, ChatTemplateOptions::default()).unwrap()
}

fn render_with(source: &str, options: &RenderOptions<'_>) -> Result<String, ChatError> {
    let messages = [ChatMessage::new("user", "hi")];
    template(source).render(&messages, options).map(|prompt| prompt.text)
}

fn render(source: &str) -> Result<String, ChatError> {
    render_with(source, &RenderOptions::default())
}

/// Renders what must fail, and soon.
fn fails(source: &str) -> ChatError {
    let start = Instant::now();
    let error = render(source).expect_err(source);
    assert!(start.elapsed() < PATIENCE, "{:?} for {source}", start.elapsed());
    error
}

fn exceeds_work(source: &str) {
    let error = fails(source);
    assert!(matches!(error, ChatError::TooMuchWork { .. }), "{error} for {source}");
}

fn is_refused(source: &str, reason: &str) {
    let error = fails(source);
    assert!(matches!(error, ChatError::Render { .. }), "{error:?} for {source}");
    assert!(error.to_string().contains(reason), "{error} for {source}");
}

/// `body` many times over, with a namespace `n` whose `x` starts as given.
fn repeated(x: &str, body: &str) -> String {
    format!(
        "{{% set n = namespace(x={x}, i=0) %}}{{% for i in range(10000) %}}{{% for j in \
         range(10000) %}}{body}{{% endfor %}}{{% endfor %}}{{{{ n.x }}}}"
    )
}

#[test]
fn endless_loops_end() {
    exceeds_work(&repeated("0", ""));
    exceeds_work(&repeated("0", "{% set n.x = n.x + 1 %}"));
    exceeds_work(&repeated("0", "{% if i == j %}{% continue %}{% endif %}"));
    exceeds_work("{% for a in range(9999) %}{{ range(9999)|sum }}{% endfor %}");
    is_refused("{{ range(1000000000) }}", "range");
}

#[test]
fn growing_strings_stop_before_they_are_large() {
    exceeds_work(&repeated("'ab'", "{% set n.x = n.x ~ n.x %}"));
    exceeds_work(&repeated("'ab'", "{% set n.x = n.x + n.x %}"));
    exceeds_work(&repeated("'ab'", "{% set n.x = n.x * 100 %}"));
    exceeds_work(&repeated("'ab'", "{% set n.x = '%s%s' % (n.x, n.x) %}"));
    exceeds_work(&repeated("'ab'", "{% set n.x = n.x.join([n.x, n.x, n.x]) %}"));
    exceeds_work(&repeated("'ab'", "{% set n.x = [n.x, n.x]|join(n.x) %}"));
    exceeds_work(&repeated("'aa'", "{% set n.x = n.x.replace('a', n.x) %}"));
    exceeds_work(&repeated("'aa'", "{% set n.x = n.x|replace('a', n.x) %}"));
    exceeds_work(&repeated("'aa'", "{% set n.x = n.x|replace('', 'aaaaaaaa') %}"));
    exceeds_work(&repeated("'<'", "{% set n.x = n.x|e|replace('&', '<<') %}"));
    exceeds_work(&repeated("'a\\na'", "{% set n.x = n.x|indent(1000) ~ n.x %}"));
    exceeds_work(&repeated("'\"'", "{% set n.x = n.x|tojson|tojson %}"));
    exceeds_work(&repeated("'a'", "{% set n.x = {n.x: n.x}|string %}"));
    exceeds_work(&repeated("'a'", "{% set t %}{{ n.x }}{{ n.x }}{% endset %}{% set n.x = t %}"));
    exceeds_work(&repeated(
        "'a'",
        "{{ 'aaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaa' * 100 }}",
    ));
    exceeds_work("{{ 'a' * 1000000000000 }}");
    exceeds_work("{% set x = 'a' * 1000000 %}{{ ([x] * 9999)|sum(start='') }}");
    exceeds_work("{{ 'a'|list|slice(1000000000) }}");
    exceeds_work("{{ 'a'|list|batch(1000000000, 0) }}");
    is_refused("{{ 'a'|indent(1000000000) }}", "more than 1000");
    exceeds_work("{{ [0] * 1000000000000 }}");
    exceeds_work(
        "{% macro m(x, n) %}{% if n %}{{ m(x ~ x, n - 1) }}{% endif %}{{ x }}{% endmacro %}\
         {{ m('ab', 60) }}",
    );
    is_refused("{{ 'a'.center(1000000000) }}", "limit is 10000");
}

#[test]
fn growing_lists_stop_wherever_they_are_used() {
    exceeds_work(&repeated("[0]", "{% set n.x = n.x + n.x %}"));
    exceeds_work(&repeated("[0]", "{% set n.x = n.x * 10 %}"));
    exceeds_work(&repeated("(0,)", "{% set n.x = n.x + n.x %}"));
    for doubled in ["[n.x, n.x]", "(n.x, n.x)", "{'a': n.x, 'b': n.x}", "dict(a=n.x, b=n.x)"] {
        exceeds_work(&repeated("0", &format!("{{% set n.x = {doubled} %}}")));
    }
    // Large, but not too large to be made: each use has its price.
    let start = "{% set n = namespace(x=[0]) %}{% for i in range(16) %}{% set n.x = [n.x, n.x] %}\
                 {% endfor %}{% set y = [n.x, 1] %}{% for i in range(10000) %}";
    for used in [
        "{% set z = n.x ~ '' %}",
        "{% set z = n.x == y %}",
        "{% set z = n.x < y %}",
        "{% set z = 1 < 2 <= 2 and n.x <= n.x < y %}",
        "{% set z = y in [n.x] %}",
        "{% set z = n.x is eq(y) %}",
        "{% set z = [n.x]|select('eq', y)|list %}",
        "{% set z = n.x|tojson %}",
        "{% set z = n.x|string %}",
        "{% set z = n.x|upper %}",
        "{% set z = n.x|join %}",
        "{% set z = n.x|indent %}",
        "{% set z = [[n.x], [n.x]]|sum(start=[])|string %}",
        "{% set m = namespace(x=n.x) %}{% set k = namespace(x=y) %}{{ (m == k)|string * 99 }}",
        "{% set z = [n.x, y]|sort %}",
        "{% set z = [n.x, y]|unique %}",
        "{% set z = [n.x, y]|max %}",
        "{% set z = {(n.x, 1): 2} %}",
        "{% set z = y.index(n.x) %}",
        "{% set z = [n.x]|map('string')|list %}",
        "{{ n.x }}",
    ] {
        exceeds_work(&format!("{start}{used}{{% endfor %}}"));
    }
}

#[test]
fn deep_values_are_refused() {
    for deeper in ["[n.x]", "(n.x,)", "{'a': n.x}", "dict(a=n.x)", "[n.x[::-1]]", "[n.x|reverse]"] {
        let source = repeated("[]", &format!("{{% set n.x = {deeper} %}}"));
        is_refused(&source, "nested more than 160 levels");
    }
    for lazy in ["n.x|reverse", "n.x[::1]", "n.x|list", "n.x|map('string')", "n.x|select"] {
        exceeds_work(&repeated("[1, 2]", &format!("{{% set n.x = {lazy} %}}")));
    }
}

#[test]
fn values_cannot_hold_themselves() {
    let start = "{% set n = namespace() %}";
    for cycle in ["n", "[n]", "{'a': n}", "namespace(a=n)", "dict(a=n)", "(1, [n])"] {
        is_refused(&format!("{start}{{% set n.x = {cycle} %}}"), "cannot be put");
    }
    is_refused("{% for i in [1] %}{{ [loop] }}{% endfor %}", "cannot be put");
    is_refused("{{ namespace() }}", "has no text");
    is_refused("{{ range }}", "has no text");
}

#[test]
fn recursion_ends() {
    for source in [
        "{% macro m() %}{{ m() }}{% endmacro %}{{ m() }}",
        "{% macro a() %}{{ b() }}{% endmacro %}{% macro b() %}{{ a() }}{% endmacro %}{{ a() }}",
        "{% macro m() %}{{ caller() }}{% call m() %}{% endcall %}{% endmacro %}\
         {% call m() %}x{% endcall %}",
        "{% for x in [1] recursive %}{{ loop([1]) }}{% endfor %}",
        "{% macro m(f) %}{{ f(f) }}{% endmacro %}{{ m(m) }}",
    ] {
        let error = fails(source);
        let is_limit = match &error {
            ChatError::Render { reason, .. } => reason.contains("recursion limit"),
            ChatError::TooMuchWork { .. } => true,
            _ => false,
        };
        assert!(is_limit, "{error} for {source}");
    }
}

#[test]
fn deep_sources_are_refused_or_work() {
    let nested = |open: &str, middle: &str, close: &str, n: usize| {
        [open.repeat(n), middle.to_owned(), close.repeat(n)].concat()
    };
    let sources = [
        format!("{{{{ {} }}}}", nested("(", "1", ")", 50_000)),
        format!("{{{{ {} }}}}", nested("[", "1", "]", 50_000)),
        format!("{{{{ {} }}}}", nested("{1:", "1", "}", 50_000)),
        format!("{{{{ {} }}}}", nested("not ", "1", "", 50_000)),
        format!("{{{{ {} }}}}", nested("-", "1", "", 50_000)),
        format!("{{{{ 1{} }}}}", "+1".repeat(50_000)),
        format!("{{{{ x{} }}}}", "|upper".repeat(50_000)),
        format!("{{{{ x{} }}}}", ".y".repeat(50_000)),
        format!("{{{{ x{} }}}}", "[0]".repeat(50_000)),
        format!("{{{{ x{} }}}}", " is defined".repeat(50_000)),
        format!("{{{{ {}1 }}}}", "1 if x else ".repeat(50_000)),
        format!("{{{{ {}1 }}}}", "x and ".repeat(50_000)),
        format!("{{{{ 1{} }}}}", " < 1".repeat(50_000)),
        nested("{% if x %}", "", "{% endif %}", 20_000),
        nested("{% for x in y %}", "", "{% endfor %}", 20_000),
        format!("{{% if x %}}{}{{% endif %}}", "{% elif x %}".repeat(20_000)),
        "{% if x %}".repeat(50_000),
        "{{ '".to_owned(),
        "{# ".repeat(1000),
        "{% raw %}".to_owned(),
        "{% generation %}".to_owned(),
    ];
    for source in sources {
        let start = Instant::now();
        let error = ChatTemplate::new(&source, ChatTemplateOptions::default()).unwrap_err();
        assert!(matches!(error, ChatError::Syntax { .. }), "{error}");
        assert!(start.elapsed() < PATIENCE, "{:?} for {:.40}", start.elapsed(), source);
    }
    // At the limits.
    let half = compile::MAX_TAG_TOKENS / 2 - 2;
    assert_eq!(render(&format!("{{{{ 1{} }}}}", "+1".repeat(half))).unwrap(), "999");
    let variable = format!("{{{{ messages|length{} }}}}", "+1".repeat(half - 1));
    assert_eq!(render(&variable).unwrap(), "998");
    let elifs = "{% elif x %}".repeat(compile::MAX_ELIF);
    assert_eq!(render(&format!("{{% if x %}}{elifs}{{% else %}}y{{% endif %}}")).unwrap(), "y");
    let error = ChatTemplate::new(&" ".repeat(MAX_TEMPLATE_BYTES + 1), Default::default());
    assert!(matches!(error, Err(ChatError::TemplateTooLarge { bytes: 1_048_577 })));
}

#[test]
fn large_requests_are_refused_or_work() {
    let options = RenderOptions::default();
    let content = "{% for m in messages %}{{ m.role }}: {{ m.content|trim }}\n{% endfor %}";
    let template = template(content);
    let message = |bytes: usize| ChatMessage::new("user", "x".repeat(bytes));
    let many = vec![message(500); 10_000];
    assert_eq!(template.render(&many, &options).unwrap().text.len(), 10_000 * 507);
    let error = template.render(&[message(MAX_INPUT_BYTES)], &options).unwrap_err();
    assert!(matches!(error, ChatError::InputTooLarge { .. }));
    let deep = (0..200).fold(json!(1), |inner, _| json!([inner]));
    let tools = [deep];
    let options = RenderOptions { tools: Some(&tools), ..options };
    let error = template.render(&[message(1)], &options).unwrap_err();
    assert!(matches!(error, ChatError::InputTooDeep { limit: 128 }));
}

#[test]
fn errors_say_what_and_where() {
    let error = fails("a\n{{ messages[0].content + 1 }}");
    let text = "the chat template failed in line 2: a string + an int is not defined";
    assert_eq!(error.to_string(), text);
    let error = ChatTemplate::new("{% if %}", Default::default()).unwrap_err();
    assert!(error.to_string().starts_with("the chat template does not compile: "), "{error}");
    let error = fails("{{ raise_exception('no ' ~ messages[0].content) }}");
    assert!(matches!(&error, ChatError::Raised(text) if text == "no hi"), "{error:?}");
    let error = fails("{{ strftime_now('%Q') }}");
    assert!(error.to_string().ends_with("the time directive %Q is not supported"), "{error}");
    let kwargs = json!({"messages": []}).as_object().unwrap().clone();
    let options = RenderOptions { template_kwargs: kwargs, ..Default::default() };
    let error = render_with("", &options).unwrap_err();
    assert_eq!(error.to_string(), "chat_template_kwargs must not set \"messages\"");
}

#[test]
fn the_last_message_can_be_continued() {
    let source = "{% for m in messages %}<{{ m.role }}>{{ m.content|trim }}</end>{% endfor %}";
    let options = RenderOptions {
        add_generation_prompt: false,
        continue_final_message: true,
        ..RenderOptions::default()
    };
    let control_tokens = vec!["</end>".to_owned()];
    let template =
        ChatTemplate::new(source, ChatTemplateOptions { control_tokens, ..Default::default() });
    let template = template.unwrap();
    let render = |contents: &[&str]| {
        let messages: Vec<_> = contents.iter().map(|&c| ChatMessage::new("a", c)).collect();
        template.render(&messages, &options).map(|prompt| prompt.text)
    };
    assert_eq!(render(&["x", " x </end> y "]).unwrap(), "<a>x</end><a>x </end> y");
    assert!(matches!(render(&[]), Err(ChatError::FinalMessage { .. })));
    let both = RenderOptions { add_generation_prompt: true, ..options.clone() };
    assert!(matches!(render_with(source, &both), Err(ChatError::Continuation)));
    let hidden = render_with("other", &options).unwrap_err();
    assert!(hidden.to_string().ends_with("does not occur in the rendered text"));
}

#[test]
fn generation_tags_mean_nothing_outside_of_text() {
    let source = "{% generation %}a{{ '{% generation %}' }}{%- endgeneration -%} \
                  {# {% generation %} #}{% set generation = 1 %}{{ generation }}";
    assert_eq!(render(source).unwrap(), "a{% generation %}1");
}

/// mistral-common #324, llama-cpp-python #1805: no content must not stop a template that puts
/// content together without a look; one that looks sees that there is none.
#[test]
fn a48_no_content_is_empty_where_a_template_would_fail_on_it() {
    let render = |source: &str| {
        let template = ChatTemplate::new(source, ChatTemplateOptions::default()).unwrap();
        let null = ChatMessage { content: Content::Null, ..ChatMessage::new("assistant", "") };
        let messages = [ChatMessage::new("user", "hi"), null];
        template.render(&messages, &RenderOptions::default()).map(|prompt| prompt.text)
    };
    let together = "{% for m in messages %}<{{ m.role + ':' + m.content }}>{% endfor %}";
    assert_eq!(render(together).unwrap(), "<user:hi><assistant:>");
    let looks = "{% for m in messages %}{{ m.content is none }} {% endfor %}";
    assert_eq!(render(looks).unwrap(), "False True ");
    let fails = render("{{ messages[1].content + 5 }}").unwrap_err();
    assert!(matches!(fails, ChatError::Render { .. }), "{fails}");
}
