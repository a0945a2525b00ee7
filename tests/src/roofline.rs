//! `kernels-triton/roofline.yaml`: what a launch of each kernel must move at least, by formula.

use std::collections::BTreeMap;
use std::fs;
use std::path::Path;

use serde::Deserialize;

/// One kernel of the file.
#[derive(Debug, Deserialize)]
pub struct Work {
    /// Bytes, as a formula over the sizes of a problem.
    bytes: String,
    /// Why the kernel moves much more than that, where it does.
    pub more: Option<String>,
}

/// The file's kernels, by `<family>.<name>`.
pub fn load() -> BTreeMap<String, Work> {
    let path = Path::new(env!("CARGO_MANIFEST_DIR")).join("../kernels-triton/roofline.yaml");
    let text = fs::read_to_string(&path).unwrap_or_else(|e| panic!("{}: {e}", path.display()));
    serde_yaml::from_str(&text).unwrap_or_else(|e| panic!("{}: {e}", path.display()))
}

impl Work {
    /// The bytes of a problem, which `size` gives the sizes of.
    pub fn bytes(&self, mut size: impl FnMut(&str) -> f64) -> f64 {
        let mut formula = Formula { rest: &self.bytes, size: &mut size };
        let value = formula.sum();
        assert!(formula.rest.is_empty(), "{:?}: no idea of {:?}", self.bytes, formula.rest);
        value
    }
}

/// What is left of a formula: numbers, names, `+ - * /` and parentheses.
struct Formula<'a> {
    rest: &'a str,
    size: &'a mut dyn FnMut(&str) -> f64,
}

impl<'a> Formula<'a> {
    fn sum(&mut self) -> f64 {
        let mut value = self.product();
        loop {
            if self.eat("+") {
                value += self.product();
            } else if self.eat("-") {
                value -= self.product();
            } else {
                return value;
            }
        }
    }

    fn product(&mut self) -> f64 {
        let mut value = self.atom();
        loop {
            if self.eat("*") {
                value *= self.atom();
            } else if self.eat("/") {
                value /= self.atom();
            } else {
                return value;
            }
        }
    }

    fn atom(&mut self) -> f64 {
        if self.eat("(") {
            let value = self.sum();
            assert!(self.eat(")"), "`)` is missing before {:?}", self.rest);
            return value;
        }
        let word = self.word();
        word.parse().unwrap_or_else(|_| (self.size)(word))
    }

    fn word(&mut self) -> &'a str {
        let is_part = |c: char| c.is_ascii_alphanumeric() || c == '_' || c == '.';
        let end = self.rest.find(|c| !is_part(c)).unwrap_or(self.rest.len());
        assert!(end > 0, "a number or a name is missing before {:?}", self.rest);
        let (word, rest) = self.rest.split_at(end);
        self.rest = rest.trim_start();
        word
    }

    fn eat(&mut self, sign: &str) -> bool {
        let rest = self.rest.strip_prefix(sign).map(str::trim_start);
        self.rest = rest.unwrap_or(self.rest);
        rest.is_some()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn formulas() {
        let of = |text: &str| {
            let work = Work { bytes: text.to_owned(), more: None };
            work.bytes(|name| if name == "top_k" { 4.0 } else { panic!("{name}") })
        };
        assert_eq!(of("2 * (top_k + 1) - 8 / 4 * 3 + top_k"), 8.0);
        assert_eq!(of("1 - 2 - 3"), -4.0);
        for (name, work) in load() {
            assert!(work.bytes(|_| 2.0) > 0.0, "{name}");
        }
    }
}
