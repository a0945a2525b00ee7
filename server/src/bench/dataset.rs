//! The requests of a benchmark: lines of a file, or made up from a seed.

use super::args::{DatasetArgs, DatasetKind};
use crate::conversation::{answer_request, refusal};
use crate::generate::request_line::{Defaults, LineInput, LineRequest, parse_line_with};
use crate::lines::LineReader;
use crate::output::one_line;
use anyhow::{Context, anyhow};
use quire_engine::engine::Prompt;
use quire_engine::{Engine, Request, SamplingParams, derived_seed};
use serde_json::{Value, json};
use std::fs::File;
use std::io::{BufReader, Read};
use std::ops::RangeInclusive;
use std::path::Path;
use std::str::FromStr;

/// Longest prompt or output that is made up, in tokens.
pub const MAX_LEN: usize = 1 << 24;
/// Most requests that are made up.
pub const MAX_REQUESTS: usize = 1 << 24;
/// Most tokens of all prompts together that are made up.
const MAX_TOKENS: usize = 1 << 28;
/// Random requests, unless set.
const DEFAULT_NUM_PROMPTS: usize = 64;

/// A request of a benchmark.
#[derive(Clone, Debug)]
pub struct BenchRequest {
    /// Its prompt as ids.
    pub request: Request,
    /// Under which name it is reported.
    pub class: Option<String>,
    /// Second at which it arrives.
    pub at_s: f64,
}

/// Requests of one kind: `COUNTxOUTPUT@PROMPT`, the prompt's length as a number or a range.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ClassSpec {
    /// What is reported: the text after `x`.
    pub name: String,
    /// How many.
    pub count: usize,
    /// Tokens to generate.
    pub output_len: usize,
    /// Tokens of the prompt; drawn from these.
    pub prompt_len: RangeInclusive<usize>,
}

impl FromStr for ClassSpec {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        let number =
            |text: &str, most: usize| text.parse().ok().filter(|n: &usize| (1..=most).contains(n));
        let read = || {
            let (count, name) = text.split_once('x')?;
            let (output, prompt) = name.split_once('@')?;
            let (least, most) = prompt.split_once('-').unwrap_or((prompt, prompt));
            let (least, most) = (number(least, MAX_LEN)?, number(most, MAX_LEN)?);
            Some(ClassSpec {
                name: name.to_owned(),
                count: number(count, MAX_REQUESTS)?,
                output_len: number(output, MAX_LEN)?,
                prompt_len: (least <= most).then_some(least..=most)?,
            })
        };
        read().ok_or_else(|| {
            format!(
                "must be COUNTxOUTPUT@PROMPT, such as 80x16@8 or 20x512@8-64, with numbers from 1 \
                 to {MAX_LEN}"
            )
        })
    }
}

/// Where the requests come from.
pub enum Dataset {
    /// A file.
    Lines(Vec<LineItem>),
    /// Random ids, a number of each kind.
    Random {
        /// The kinds.
        classes: Vec<ClassSpec>,
        /// Lengths of prompts and outputs are drawn from `1 − R` to `1 + R` times those of the
        /// class.
        range_ratio: f64,
        /// Tokens before each prompt, the same for all.
        prefix_len: usize,
    },
}

/// A line as far as it can be read without a model.
#[derive(Debug)]
pub struct LineItem {
    number: u64,
    request: LineRequest,
    class: Option<String>,
    at_s: f64,
}

impl Dataset {
    /// What `args` say. `defaults` stand for what lines do not say.
    ///
    /// # Errors
    /// The input cannot be read, a line is bad, or there is none.
    pub fn open(args: &DatasetArgs, defaults: &Defaults) -> anyhow::Result<Self> {
        if let Some(path) = &args.input {
            let most = args.num_prompts.unwrap_or(usize::MAX);
            return if path == Path::new("-") {
                Self::read(std::io::stdin(), "standard input", most, defaults)
            } else {
                let name = one_line(&path.display().to_string());
                let file = File::open(path).with_context(|| format!("cannot read {name}"))?;
                Self::read(file, &name, most, defaults)
            };
        }
        if !args.classes.is_empty() {
            anyhow::ensure!(
                args.dataset != Some(DatasetKind::Random),
                "--classes are requests of --dataset mix, not of random"
            );
            let (classes, range_ratio, prefix_len) = (args.classes.clone(), 0.0, 0);
            return Ok(Dataset::Random { classes, range_ratio, prefix_len });
        }
        let class = ClassSpec {
            name: String::new(),
            count: args.num_prompts.unwrap_or(DEFAULT_NUM_PROMPTS),
            output_len: args.output_len,
            prompt_len: args.input_len..=args.input_len,
        };
        Ok(Dataset::Random {
            classes: vec![class],
            range_ratio: args.range_ratio,
            prefix_len: args.prefix_len,
        })
    }

    fn read(
        input: impl Read,
        name: &str,
        most: usize,
        defaults: &Defaults,
    ) -> anyhow::Result<Self> {
        let mut lines = LineReader::new(BufReader::new(input));
        let mut items = Vec::new();
        while items.len() < most {
            let line = lines.next().with_context(|| format!("cannot read {name}"))?;
            let Some(line) = line else { break };
            let item = line.text.and_then(|text| parse_item(&text, line.number, defaults));
            items.push(item.map_err(|e| anyhow!("{name}:{}: {}", line.number, one_line(&e)))?);
        }
        anyhow::ensure!(!items.is_empty(), "{name} has no requests");
        Ok(Dataset::Lines(items))
    }

    /// What a report says of it.
    pub fn describe(&self) -> Value {
        match self {
            Dataset::Lines(items) => json!({"kind": "lines", "num_requests": items.len()}),
            Dataset::Random { classes, range_ratio, prefix_len } => {
                let class = |c: &ClassSpec| {
                    json!({
                        "num_requests": c.count,
                        "output_len": c.output_len,
                        "prompt_len": [c.prompt_len.start(), c.prompt_len.end()],
                    })
                };
                let classes: Vec<Value> = classes.iter().map(class).collect();
                json!({
                    "kind": "random",
                    "classes": classes,
                    "range_ratio": range_ratio,
                    "prefix_len": prefix_len,
                })
            }
        }
    }

    /// The requests in order of arrival, checked by `engine`, which is idle. With `rate`, arrivals
    /// are drawn anew.
    ///
    /// # Errors
    /// The engine refuses one; the message says which.
    pub fn requests(
        &self,
        engine: &mut Engine,
        seed: u64,
        rate: Option<f64>,
    ) -> anyhow::Result<Vec<BenchRequest>> {
        let mut random = Random::new(seed);
        let mut requests = match self {
            Dataset::Lines(items) => {
                let made = items.iter().zip(1..).map(|(item, i)| {
                    line_request(item, derived_seed(seed, i), engine)
                        .with_context(|| format!("line {} of the input", item.number))
                });
                made.collect::<anyhow::Result<Vec<_>>>()?
            }
            Dataset::Random { classes, range_ratio, prefix_len } => {
                let lens = lengths(classes, *range_ratio, &mut random);
                check_lengths(&lens, *prefix_len, engine.limits().max_model_len)?;
                made_up(&lens, *prefix_len, engine.vocab_size(), &mut random)
            }
        };
        if let Some(rate) = rate {
            let mut at_s = 0.0;
            for request in &mut requests {
                request.at_s = at_s;
                at_s -= (1.0 - random.unit()).ln() / rate;
            }
        }
        for (i, request) in requests.iter().enumerate() {
            let id = engine.add_request(request.request.clone()).map_err(refusal);
            let name = || match self {
                Dataset::Lines(items) => format!("line {} of the input", items[i].number),
                Dataset::Random { .. } => format!("request {}", i + 1),
            };
            engine.abort(id.with_context(name)?);
        }
        requests.sort_by(|a, b| a.at_s.total_cmp(&b.at_s));
        Ok(requests)
    }
}

/// Reads a line: a request with `class` and `at`.
fn parse_item(text: &str, number: u64, defaults: &Defaults) -> Result<LineItem, String> {
    let (line, [class, at]) = parse_line_with(["class", "at"], text, defaults);
    let request = line.request?;
    let class = match class {
        Value::Null => None,
        Value::String(class) => Some(class),
        other => return Err(format!("class must be a string, got {other}")),
    };
    let at_s = match at {
        Value::Null => 0.0,
        value => value.as_f64().filter(|at| (0.0..1e9).contains(at)).ok_or_else(|| {
            format!("at must be a number of seconds from 0 to below 1e9, got {value}")
        })?,
    };
    Ok(LineItem { number, request, class, at_s })
}

fn line_request(item: &LineItem, seed: u64, engine: &Engine) -> anyhow::Result<BenchRequest> {
    let LineRequest { input, mut params } = item.request.clone();
    params.seed.get_or_insert(seed);
    let request = match input {
        LineInput::Prompt(Prompt::Text(text)) => {
            Request::new(engine.encode(&text).map_err(refusal)?, params)
        }
        LineInput::Prompt(prompt) => Request::new(prompt, params),
        LineInput::Chat(conversation) => {
            let prompt = conversation.encode(engine).map_err(refusal)?;
            answer_request(engine, prompt, params, None)
        }
    };
    Ok(BenchRequest { request, class: item.class.clone(), at_s: item.at_s })
}

/// Class name, prompt length and output length of a request.
type Lengths<'a> = (&'a str, usize, usize);

/// The lengths of all requests, in random order where there are several classes.
fn lengths<'a>(
    classes: &'a [ClassSpec],
    range_ratio: f64,
    random: &mut Random,
) -> Vec<Lengths<'a>> {
    let mut lens = Vec::new();
    for class in classes {
        for _ in 0..class.count {
            let prompt = random.within(class.prompt_len.clone());
            let mut around = |len: usize| {
                let least = (len as f64 * (1.0 - range_ratio)).floor() as usize;
                let most = (len as f64 * (1.0 + range_ratio)).ceil() as usize;
                random.within(least.max(1)..=most)
            };
            let (prompt, output) = (around(prompt), around(class.output_len));
            lens.push((class.name.as_str(), prompt, output));
        }
    }
    if classes.len() > 1 {
        for i in (1..lens.len()).rev() {
            lens.swap(i, random.within(0..=i));
        }
    }
    lens
}

/// Checks that the prompts can be made and run.
fn check_lengths(lens: &[Lengths<'_>], prefix_len: usize, limit: usize) -> anyhow::Result<()> {
    for (i, (_, prompt, output)) in lens.iter().enumerate() {
        let prompt = prefix_len + prompt;
        anyhow::ensure!(
            prompt + output <= limit,
            "request {} has a prompt of {prompt} tokens and {output} to generate; together they \
             exceed the context of {limit} tokens",
            i + 1
        );
    }
    let tokens: usize = lens.iter().map(|(_, prompt, _)| prefix_len + prompt).sum();
    anyhow::ensure!(
        tokens <= MAX_TOKENS,
        "the prompts have {tokens} tokens together; the limit is {MAX_TOKENS}"
    );
    Ok(())
}

fn made_up(
    lens: &[Lengths<'_>],
    prefix_len: usize,
    vocab_size: usize,
    random: &mut Random,
) -> Vec<BenchRequest> {
    let prefix = random.ids(prefix_len, vocab_size);
    let request = |&(class, prompt_len, output_len): &Lengths<'_>| {
        let mut prompt = prefix.clone();
        prompt.extend(random.ids(prompt_len, vocab_size));
        let class = (!class.is_empty()).then(|| class.to_owned());
        BenchRequest { request: Request::new(prompt, greedy(output_len)), class, at_s: 0.0 }
    };
    lens.iter().map(request).collect()
}

/// Exactly `max_tokens` tokens, each the most likely one.
pub fn greedy(max_tokens: usize) -> SamplingParams {
    SamplingParams {
        max_tokens: Some(max_tokens),
        temperature: 0.0,
        ignore_eos: true,
        seed: Some(0),
        ..Default::default()
    }
}

/// Numbers that follow from a seed.
pub struct Random {
    seed: u64,
    drawn: u64,
}

impl Random {
    /// Those of `seed`.
    pub fn new(seed: u64) -> Self {
        Random { seed, drawn: 0 }
    }

    /// From 0 to below 1.
    pub fn unit(&mut self) -> f64 {
        self.drawn += 1;
        // 53 bits, as many as an f64 has.
        derived_seed(self.seed, self.drawn) as f64 / (1u64 << 53) as f64
    }

    /// One of `range`.
    pub fn within(&mut self, range: RangeInclusive<usize>) -> usize {
        let count = range.end() - range.start() + 1;
        (range.start() + (self.unit() * count as f64) as usize).min(*range.end())
    }

    /// So many ids below `vocab_size`.
    pub fn ids(&mut self, count: usize, vocab_size: usize) -> Vec<u32> {
        (0..count).map(|_| self.within(0..=vocab_size - 1) as u32).collect()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn defaults() -> Defaults {
        let params = SamplingParams::default();
        Defaults { prompt: params.clone(), chat: params }
    }

    fn read(text: &str, most: usize) -> Result<Vec<LineItem>, String> {
        match Dataset::read(text.as_bytes(), "f", most, &defaults()) {
            Ok(Dataset::Lines(items)) => Ok(items),
            Ok(Dataset::Random { .. }) => panic!("lines"),
            Err(error) => Err(error.to_string()),
        }
    }

    #[test]
    fn lines_have_a_class_and_a_time() {
        let text = "{\"prompt_token_ids\": [1, 2], \"max_tokens\": 3, \"class\": \"a\"}\n\n\
                    {\"id\": 1, \"prompt\": \"x\", \"at\": 1.5}\n{\"prompt\": \"y\"}\n";
        let items = read(text, usize::MAX).unwrap();
        let kept: Vec<_> = items.iter().map(|i| (i.number, i.class.as_deref(), i.at_s)).collect();
        assert_eq!(kept, [(1, Some("a"), 0.0), (3, None, 1.5), (4, None, 0.0)]);
        assert_eq!(items[0].request.params.max_tokens, Some(3));
        assert_eq!(read(text, 2).unwrap().len(), 2);
    }

    #[test]
    fn a_bad_line_is_named_with_its_fault() {
        for (line, fault) in [
            ("[]", "f:1: not a valid request"),
            ("{\"prompt\": \"x\", \"class\": 1}", "f:1: class must be a string, got 1"),
            ("{\"prompt\": \"x\", \"at\": -1}", "f:1: at must be a number of seconds"),
            ("{\"prompt\": \"x\", \"at\": \"1\"}", "f:1: at must be a number of seconds"),
            (
                "{\"prompt\": \"x\", \"max_token\": 1}",
                "f:1: unknown field \"max_token\"; a line has id, class, at, one of prompt",
            ),
            ("{\"prompt\": \"x\", \"prompt\": \"y\"}", "f:1: field \"prompt\" is there twice"),
            ("{\"class\": \"a\", \"prompt\": \"x\", \"class\": \"b\"}", "f:1: field \"class\" is"),
            ("{\"class\": \"a\"}", "f:1: none of \"prompt\""),
            ("", "f has no requests"),
        ] {
            let error = read(line, usize::MAX).unwrap_err();
            assert!(error.starts_with(fault), "{line}: {error}");
        }
    }

    #[test]
    fn classes_are_read_and_mixed() {
        let classes = ["8x16@8", "2x512@8-64"].map(|text| text.parse::<ClassSpec>().unwrap());
        assert_eq!((classes[1].name.as_str(), classes[1].prompt_len.clone()), ("512@8-64", 8..=64));
        let lens = lengths(&classes, 0.0, &mut Random::new(3));
        let count = |output| lens.iter().filter(|len| len.2 == output).count();
        assert_eq!((lens.len(), count(16), count(512)), (10, 8, 2));
        assert!(lens.iter().filter(|len| len.2 == 512).all(|len| (8..=64).contains(&len.1)));
        // In random order, and the same for the same seed.
        assert!(!lens.is_sorted_by_key(|len| len.2), "{lens:?}");
        assert_eq!(lens, lengths(&classes, 0.0, &mut Random::new(3)));
        for bad in ["", "8", "8x16", "0x16@8", "8x0@8", "8x16@0", "8x16@9-8", "8x16@-1", "ax1@1"] {
            assert!(bad.parse::<ClassSpec>().is_err(), "{bad}");
        }
    }

    #[test]
    fn random_lengths_fill_their_range() {
        let class: ClassSpec = "400x20@10".parse().unwrap();
        let lens = lengths(std::slice::from_ref(&class), 0.5, &mut Random::new(1));
        let of = |get: fn(&Lengths<'_>) -> usize| {
            let all = lens.iter().map(get);
            (all.clone().min().unwrap(), all.max().unwrap())
        };
        assert_eq!((of(|len| len.1), of(|len| len.2)), ((5, 15), (10, 30)));
    }

    #[test]
    fn lengths_are_checked_before_prompts_are_made() {
        let fault = |lens: &[Lengths<'_>], prefix_len, limit| {
            check_lengths(lens, prefix_len, limit).err().map(|error| error.to_string())
        };
        assert_eq!(fault(&[("", 4, 2)], 2, 8), None);
        let text = fault(&[("", 3, 2), ("", 4, 3)], 2, 8).unwrap();
        assert!(text.starts_with("request 2 has a prompt of 6 tokens and 3 to generate"), "{text}");
        let text = fault(&[("", MAX_TOKENS, 1), ("", 1, 1)], 0, usize::MAX).unwrap();
        assert!(text.contains("268435457 tokens together"), "{text}");
    }

    #[test]
    fn prompts_share_the_prefix_alone() {
        let lens = [("", 4, 1), ("", 4, 1)];
        let requests = made_up(&lens, 3, 1000, &mut Random::new(7));
        let ids = |i: usize| match &requests[i].request.prompt {
            Prompt::Tokens(ids) => ids.clone(),
            Prompt::Text(_) => panic!("ids"),
        };
        let (a, b) = (ids(0), ids(1));
        assert_eq!((a.len(), b.len()), (7, 7));
        assert_eq!(a[..3], b[..3]);
        assert_ne!(a[3..], b[3..]);
    }
}
