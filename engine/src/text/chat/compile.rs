//! From the source of a template to instructions in which nothing is unbounded.
//!
//! ```text
//!   source ─ generation tags → if ─▶ lexer ─▶ parser ─▶ instructions ─ operators → calls ─▶ done
//! ```
//!
//! The engine has no hooks for operators, so the instructions of those that grow or walk values
//! are replaced by calls of the functions in `ops`. This uses the engine's unstable interface; its
//! version is pinned for that reason.

use std::collections::{BTreeMap, BTreeSet};

use minijinja::machinery::ast::Stmt;
use minijinja::machinery::{
    CodeGenerator, Instruction, Instructions, Span, Token, parse, tokenize,
};
use minijinja::syntax::SyntaxConfig;
use minijinja::{Error, ErrorKind};

/// The name that errors know the template by.
const NAME: &str = "chat template";

/// The most tokens between one pair of delimiters. The parser and the code generator recurse over
/// them.
pub const MAX_TAG_TOKENS: usize = 2000;

/// The most `elif` branches of a template, over which the same recursion goes.
pub const MAX_ELIF: usize = 500;

/// A filter that has no cached place in the engine.
const UNCACHED: u8 = !0;

/// A template's source after [`prepare`].
#[derive(Debug)]
pub struct Prepared {
    pub source: String,
    /// The string literals of the template.
    pub literals: BTreeSet<String>,
}

fn syntax() -> Result<SyntaxConfig, Error> {
    // As transformers configures Jinja2.
    SyntaxConfig::builder().trim_blocks(true).lstrip_blocks(true).build()
}

fn error(message: String, span: Span) -> Error {
    Error::new(ErrorKind::SyntaxError, format!("{message} (line {})", span.start_line))
}

/// Rewrites the tags `generation` and `endgeneration`, which mark what the assistant says for
/// training and mean nothing here, and checks the limits on tags.
pub fn prepare(source: &str) -> Result<Prepared, Error> {
    let mut out = String::with_capacity(source.len());
    let mut literals = BTreeSet::new();
    let mut copied = 0;
    let mut tag_tokens = 0;
    let mut elifs = 0;
    let mut after_block_start = false;
    for token in tokenize(source, false, syntax()?) {
        let (token, span) = token?;
        tag_tokens += 1;
        if tag_tokens > MAX_TAG_TOKENS {
            return Err(error(format!("a tag has more than {MAX_TAG_TOKENS} tokens"), span));
        }
        let begins_tag = std::mem::take(&mut after_block_start);
        match token {
            Token::BlockStart => {
                after_block_start = true;
                tag_tokens = 0;
            }
            Token::VariableStart | Token::TemplateData(_) => tag_tokens = 0,
            Token::Ident(name @ ("generation" | "endgeneration")) if begins_tag => {
                let instead = if name == "generation" { "if true" } else { "endif" };
                out.push_str(&source[copied..span.start_offset as usize]);
                out.push_str(instead);
                copied = span.end_offset as usize;
            }
            Token::Ident("elif") if begins_tag => {
                elifs += 1;
                if elifs > MAX_ELIF {
                    return Err(error(format!("there are more than {MAX_ELIF} elif tags"), span));
                }
            }
            Token::Str(text) => {
                literals.insert(text.to_owned());
            }
            Token::String(text) => {
                literals.insert(text.into_string());
            }
            _ => {}
        }
    }
    out.push_str(&source[copied..]);
    Ok(Prepared { source: out, literals })
}

/// The instructions of a prepared template.
pub fn compile(source: &str) -> Result<Instructions<'_>, Error> {
    let ast: Stmt<'_> = parse(source, NAME, syntax()?)?;
    let mut generator = CodeGenerator::new(NAME, source);
    generator.compile_stmt(&ast);
    let (instructions, _): (_, BTreeMap<_, _>) = generator.finish();
    bound(&instructions)
}

/// Replaces the operators, and checks values before they go into a namespace.
fn bound<'source>(old: &Instructions<'source>) -> Result<Instructions<'source>, Error> {
    let mut new = Instructions::new(old.name(), old.source());
    // Where each old instruction went; jumps go to the checks in front of an instruction.
    let mut places = Vec::new();
    let mut next = 0;
    while let Some(instruction) = old.get(places.len() as u32) {
        let at = places.len() as u32;
        let line = old.get_line(at).and_then(|line| u16::try_from(line).ok()).unwrap_or(0);
        places.push(next);
        let mut add = |instruction| next = new.add_with_line(instruction, line) + 1;
        match instruction {
            Instruction::SetAttr(_) => {
                // The namespace is on top of the value.
                add(Instruction::Swap);
                add(call("ns.", 1));
                add(Instruction::Swap);
                add(instruction.clone());
            }
            Instruction::CompareAndPreserve(_) => {
                add(call("checked", 1));
                add(instruction.clone());
            }
            _ => add(replacement(instruction)?),
        }
    }
    places.push(next);
    relocate(&mut new, &places);
    Ok(new)
}

/// Turns the targets of jumps from old places into new ones.
fn relocate(new: &mut Instructions<'_>, places: &[u32]) {
    for at in 0..places[places.len() - 1] {
        if let Some(
            Instruction::Iterate(target)
            | Instruction::Jump(target)
            | Instruction::JumpIfFalse(target)
            | Instruction::JumpIfFalseOrPop(target)
            | Instruction::JumpIfTrueOrPop(target)
            | Instruction::BuildMacro(_, target, _),
        ) = new.get_mut(at)
        {
            *target = places[*target as usize];
        }
    }
}

fn call<'source>(name: &'static str, arguments: u16) -> Instruction<'source> {
    Instruction::ApplyFilter(name, Some(arguments), UNCACHED)
}

fn replacement<'source>(old: &Instruction<'source>) -> Result<Instruction<'source>, Error> {
    let count = |count: usize| {
        u16::try_from(count)
            .map_err(|_| Error::new(ErrorKind::SyntaxError, format!("a literal has {count} items")))
    };
    Ok(match old {
        Instruction::Add => call("+", 2),
        Instruction::Mul => call("*", 2),
        Instruction::Rem => call("%", 2),
        Instruction::StringConcat => call("~", 2),
        Instruction::Eq => call("==", 2),
        Instruction::Ne => call("!=", 2),
        Instruction::Lt => call("<", 2),
        Instruction::Lte => call("<=", 2),
        Instruction::Gt => call(">", 2),
        Instruction::Gte => call(">=", 2),
        Instruction::In => call("in", 2),
        Instruction::GetItem => call("[]", 2),
        Instruction::Slice => call("[:]", 4),
        Instruction::BuildList(Some(n)) => call("list[]", count(*n)?),
        Instruction::BuildTuple(Some(n)) => call("tuple()", count(*n)?),
        Instruction::BuildMap(pairs) => call("dict{}", count(pairs.saturating_mul(2))?),
        other => other.clone(),
    })
}
