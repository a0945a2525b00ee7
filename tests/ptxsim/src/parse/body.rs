//! The body of a kernel: register declarations, labels, statements.

use std::collections::HashMap;

use super::decode;
use super::operand::{self, Operand};
use super::{Line, collapse};
use crate::ParseError;
use crate::alu::{LANES, Lanes};
use crate::exec::SHARED_BASE;
use crate::program::{Guard, Instr, Kernel, Op, Param, Pred, Reg, Src};

/// Names from outside of the body.
pub(super) struct Context<'a> {
    pub params: &'a [Param],
    /// Name of the dynamic shared memory.
    pub shared: Option<&'a str>,
}

/// A statement, a label or a declaration.
struct Statement<'a> {
    line: Line<'a>,
    text: String,
}

/// Registers, labels and constants of a body.
pub(super) struct Scope<'a> {
    context: &'a Context<'a>,
    /// Prefix, such as `%rd` → first index, count, bits (0: predicates).
    registers: HashMap<String, (u32, u32, u32)>,
    /// Label → index of the instruction after it.
    labels: HashMap<String, usize>,
    constants: Vec<u64>,
}

/// Parses the lines between the braces of an entry; the caller adds name, threads and parameters.
pub(super) fn parse(lines: &[Line<'_>], context: &Context<'_>) -> Result<Kernel, ParseError> {
    let mut scope =
        Scope { context, registers: HashMap::new(), labels: HashMap::new(), constants: vec![] };
    let (mut num_regs, mut num_preds) = (0, 0);
    let mut statements = Vec::new();
    for statement in split(lines)? {
        let fail = |reason: &str| statement.line.error(reason);
        if let Some(label) = statement.text.strip_suffix(':') {
            if scope.labels.insert(label.into(), statements.len()).is_some() {
                return Err(fail("the label is defined twice"));
            }
        } else if statement.text.starts_with(".reg ") {
            let (prefix, bits, count) =
                registers(&statement.text).ok_or_else(|| fail("unknown register declaration"))?;
            let total = if bits == 0 { &mut num_preds } else { &mut num_regs };
            if scope.registers.insert(prefix, (*total, count, bits)).is_some() {
                return Err(fail("the registers are declared twice"));
            }
            *total += count;
        } else if statement.text.starts_with('.') && statement.text != ".pragma \"nounroll\"" {
            return Err(fail("unknown directive"));
        } else if !statement.text.starts_with('.') {
            statements.push(statement);
        }
    }
    let mut opcodes = Opcodes::default();
    let code = statements
        .iter()
        .map(|statement| {
            instruction(&mut scope, &mut opcodes, statement).map_err(|reason| ParseError {
                line: statement.line.number,
                text: statement.text.clone(),
                reason,
            })
        })
        .collect::<Result<Vec<_>, _>>()?;
    let ends =
        |instr: &Instr| instr.guard.is_none() && matches!(instr.op, Op::Return | Op::Branch { .. });
    match (lines.last(), code.last()) {
        (_, Some(last)) if ends(last) => {}
        (line, _) => {
            let line = line.copied().unwrap_or(Line { number: 1, text: "" });
            return Err(line.error("the kernel does not end with ret or bra"));
        }
    }
    let broadcast = |&value: &u64| -> Lanes { [value; LANES] };
    Ok(Kernel {
        name: String::new(),
        params: Vec::new(),
        threads: 0,
        num_regs: num_regs as usize,
        num_preds: num_preds as usize,
        constants: scope.constants.iter().map(broadcast).collect(),
        code,
        opcodes: opcodes.names,
    })
}

/// Splits at `;`; labels are statements of their own and keep their `:`.
fn split<'a>(lines: &[Line<'a>]) -> Result<Vec<Statement<'a>>, ParseError> {
    let mut statements: Vec<Statement<'a>> = Vec::new();
    let mut open: Option<Statement<'a>> = None;
    for &line in lines {
        let mut rest = line.text;
        while !rest.is_empty() {
            let label = rest.find(':').map(|end| &rest[..=end]);
            let label = label.filter(|label| open.is_none() && label.starts_with('$'));
            if let Some(label) = label {
                statements.push(Statement { line, text: label.into() });
                rest = rest[label.len()..].trim_start();
                continue;
            }
            let (text, after) = match rest.split_once(';') {
                Some((text, after)) => (text, Some(after)),
                None => (rest, None),
            };
            let mut statement = open.take().unwrap_or(Statement { line, text: String::new() });
            statement.text = collapse(&format!("{} {text}", statement.text));
            if after.is_some() {
                if statement.text.starts_with(['{', '}']) {
                    return Err(statement.line.error("nested blocks are not supported"));
                }
                statements.push(statement);
            } else {
                open = Some(statement);
            }
            rest = after.unwrap_or("").trim_start();
        }
    }
    match open {
        Some(statement) => Err(statement.line.error("a statement without ;")),
        None => Ok(statements),
    }
}

/// `.reg .b32 %r<9>` → (`%r`, 32, 9); predicates have 0 bits.
fn registers(text: &str) -> Option<(String, u32, u32)> {
    let [_, ty, name] = text.split(' ').collect::<Vec<_>>()[..] else { return None };
    let bits = match ty {
        ".pred" => 0,
        ".b16" => 16,
        ".b32" => 32,
        ".b64" => 64,
        _ => return None,
    };
    let (prefix, count) = name.strip_suffix('>')?.split_once('<')?;
    let named = prefix.starts_with('%') && prefix[1..].chars().all(|c| c.is_ascii_alphabetic());
    Some((prefix.into(), bits, count.parse().ok()?)).filter(|_| named)
}

/// Opcodes in order of appearance.
#[derive(Default)]
struct Opcodes {
    names: Vec<String>,
    index: HashMap<String, usize>,
}

impl Opcodes {
    fn intern(&mut self, name: &str) -> usize {
        *self.index.entry(name.into()).or_insert_with(|| {
            self.names.push(name.into());
            self.names.len() - 1
        })
    }
}

fn instruction(
    scope: &mut Scope<'_>,
    opcodes: &mut Opcodes,
    statement: &Statement<'_>,
) -> Result<Instr, String> {
    let text = statement.text.as_str();
    let (guard, rest) = match text.strip_prefix('@') {
        Some(guarded) => {
            let (pred, rest) = guarded.split_once(' ').ok_or("a guard without instruction")?;
            let (negated, name) = match pred.strip_prefix('!') {
                Some(name) => (true, name),
                None => (false, pred),
            };
            match scope.register(name)? {
                Operand::Pred(pred) => (Some(Guard { pred, negated }), rest),
                _ => return Err(format!("the guard {name} is not a predicate")),
            }
        }
        None => (None, text),
    };
    let (opcode, operands) = rest.split_once(' ').unwrap_or((rest, ""));
    let operands = operand::parse(operands, scope)?;
    let op = decode::instruction(opcode, &operands, scope)?;
    let opcode = opcodes.intern(opcode);
    Ok(Instr { guard, op, opcode, line: statement.line.number, text: text.into() })
}

impl Scope<'_> {
    /// A declared register, as operand.
    pub fn register(&self, name: &str) -> Result<Operand, String> {
        let digits = name.trim_start_matches(|c: char| !c.is_ascii_digit());
        let prefix = &name[..name.len() - digits.len()];
        let declared = self.registers.get(prefix);
        let index = digits.parse::<u32>().ok();
        match (declared, index) {
            (Some(&(first, count, bits)), Some(index)) if index < count => Ok(match bits {
                0 => Operand::Pred(Pred(first + index)),
                _ => Operand::Reg { reg: Reg(first + index), bits },
            }),
            _ => Err(format!("{name} is not a declared register")),
        }
    }

    /// Index of the instruction after a label.
    pub fn label(&self, name: &str) -> Result<usize, String> {
        self.labels.get(name).copied().ok_or_else(|| format!("there is no label {name}"))
    }

    /// The parameter of that name.
    pub fn param(&self, name: &str) -> Option<&Param> {
        self.context.params.iter().find(|param| param.name == name)
    }

    /// Address of a shared variable.
    pub fn shared(&self, name: &str) -> Option<u64> {
        (self.context.shared == Some(name)).then_some(SHARED_BASE)
    }

    /// A constant operand.
    pub fn constant(&mut self, value: u64) -> Src {
        let known = self.constants.iter().position(|&constant| constant == value);
        let index = known.unwrap_or_else(|| {
            self.constants.push(value);
            self.constants.len() - 1
        });
        Src::Const(index as u32)
    }
}
