//! Parses the text of a Mosaic module: the subset of MLIR that the kernels use. Anything else is an error.

use std::collections::BTreeMap;

pub type Result<T> = std::result::Result<T, String>;

/// Functions by name.
pub type Module = BTreeMap<String, Function>;

pub struct Function {
    pub arguments: Vec<(String, Type)>,
    pub attributes: String,
    pub body: Vec<Op>,
}

/// An operation and the regions in its braces.
pub struct Op {
    /// Name of the result, if any.
    pub result: Option<String>,
    pub name: String,
    /// Text between the name and the types.
    pub text: String,
    pub types: Vec<Type>,
    pub then: Vec<Op>,
    pub otherwise: Vec<Op>,
}

#[derive(Clone, Debug, PartialEq)]
pub enum Type {
    Scalar(Element),
    Vector(Element, Vec<usize>),
    /// A block in on-chip memory.
    Block(Element, Vec<usize>),
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Element {
    F32,
    BF16,
    I32,
    Index,
    I1,
}

impl Element {
    fn parse(text: &str) -> Result<Self> {
        Ok(match text {
            "f32" => Element::F32,
            "bf16" => Element::BF16,
            "i32" => Element::I32,
            "index" => Element::Index,
            "i1" => Element::I1,
            _ => return Err(format!("element type '{text}'")),
        })
    }
}

impl Type {
    pub fn parse(text: &str) -> Result<Self> {
        let text = text.trim();
        let shaped = |inner: &str| -> Result<(Element, Vec<usize>)> {
            let mut parts: Vec<&str> = inner.split('x').collect();
            let element = Element::parse(parts.pop().unwrap_or_default())?;
            let dims = parts.iter().map(|d| d.parse().map_err(|_| format!("dimension '{d}' of {text}")));
            Ok((element, dims.collect::<Result<_>>()?))
        };
        if let Some(inner) = text.strip_prefix("vector<").and_then(|t| t.strip_suffix('>')) {
            let (element, dims) = shaped(inner)?;
            return Ok(Type::Vector(element, dims));
        }
        if let Some(inner) = text.strip_prefix("memref<").and_then(|t| t.strip_suffix(", #tpu.memory_space<vmem>>")) {
            let (element, dims) = shaped(inner)?;
            return Ok(Type::Block(element, dims));
        }
        Ok(Type::Scalar(Element::parse(text)?))
    }
}

/// Splits text at commas outside brackets.
pub fn pieces(text: &str) -> Vec<String> {
    let mut all = vec![String::new()];
    let mut depth = 0;
    let mut before = ' ';
    for c in text.chars() {
        match c {
            '<' | '[' | '(' | '{' => depth += 1,
            '>' if before == '-' => {}
            '>' | ']' | ')' | '}' => depth -= 1,
            _ => {}
        }
        if c == ',' && depth == 0 {
            all.push(String::new());
        } else if let Some(last) = all.last_mut() {
            last.push(c);
        }
        before = c;
    }
    all.into_iter().map(|p| p.trim().to_string()).filter(|p| !p.is_empty()).collect()
}

/// Returns the value of an attribute.
pub fn attribute<'a>(text: &'a str, key: &str) -> Result<&'a str> {
    let missing = || format!("no '{key}' in '{text}'");
    let start = text.find(&format!("{key} = ")).ok_or_else(missing)? + key.len() + 3;
    let mut depth = 0;
    for (at, c) in text[start..].char_indices() {
        match c {
            '<' | '[' | '(' | '{' => depth += 1,
            '>' | ']' | ')' | '}' if depth > 0 => depth -= 1,
            ',' | '}' | ']' if depth == 0 => return Ok(text[start..start + at].trim()),
            _ => {}
        }
    }
    Ok(text[start..].trim())
}

/// Parses `array<i64: 1, 2>` or `[1, 2]`.
pub fn numbers(text: &str) -> Result<Vec<usize>> {
    let inner = text.trim().trim_start_matches("array<").trim_matches(['[', ']', '>']);
    let inner = inner.split_once(':').map_or(inner, |(_, list)| list);
    pieces(inner).iter().map(|n| n.parse().map_err(|_| format!("number '{n}'"))).collect()
}

/// Parses a module.
pub fn module(text: &str) -> Result<Module> {
    let mut lines = text.lines().map(str::trim).filter(|l| !l.is_empty()).peekable();
    let mut functions = Module::new();
    while let Some(line) = lines.next() {
        let Some(head) = line.strip_prefix("func.func ") else {
            match line.starts_with("module") || line == "}" {
                true => continue,
                false => return Err(format!("outside of functions: {line}")),
            }
        };
        let head = head.strip_prefix("private ").unwrap_or(head);
        let (name, rest) = head.split_once('(').ok_or("a function without arguments")?;
        let end = closing(rest).ok_or("arguments do not end")?;
        let mut arguments = Vec::new();
        for argument in pieces(&rest[..end]) {
            let (name, ty) = argument.split_once(':').ok_or("an argument without a type")?;
            arguments.push((name.trim().to_string(), Type::parse(ty)?));
        }
        let body = ops(&mut lines)?;
        let function = Function { arguments, attributes: rest[end..].to_string(), body };
        functions.insert(name.trim_start_matches('@').to_string(), function);
    }
    Ok(functions)
}

/// Returns the position of the parenthesis that closes the one opened before `text`.
fn closing(text: &str) -> Option<usize> {
    let mut depth = 1;
    text.char_indices().find_map(|(at, c)| {
        depth += i32::from(c == '(') - i32::from(c == ')');
        (depth == 0).then_some(at)
    })
}

/// Parses operations up to the closing brace.
fn ops<'a>(lines: &mut std::iter::Peekable<impl Iterator<Item = &'a str>>) -> Result<Vec<Op>> {
    let mut all: Vec<Op> = Vec::new();
    loop {
        let line = lines.next().ok_or("a region does not end")?;
        match line {
            "}" => return Ok(all),
            "} else {" => return Err("an 'else' of nothing".into()),
            _ => {}
        }
        let (result, rest) = match line.split_once(" = ") {
            Some((name, rest)) if name.starts_with('%') && !name.contains(' ') => (Some(name.to_string()), rest),
            _ => (None, line),
        };
        let (name, rest) = rest.split_once(' ').unwrap_or((rest, ""));
        if let Some(condition) = rest.strip_suffix(" {") {
            if name != "scf.if" || result.is_some() {
                return Err(format!("unknown region: {line}"));
            }
            let (then, otherwise) = branches(lines)?;
            let (name, text) = (name.to_string(), condition.to_string());
            all.push(Op { result: None, name, text, types: Vec::new(), then, otherwise });
            continue;
        }
        let (text, types) = rest.rsplit_once(" : ").unwrap_or((rest, ""));
        let types = types.replace(" -> ", ", ").replace(" to ", ", ");
        let types = pieces(&types).iter().map(|t| Type::parse(t)).collect::<Result<_>>();
        let types = types.map_err(|e| format!("{e} in: {line}"))?;
        let (name, text) = (name.to_string(), text.to_string());
        all.push(Op { result, name, text, types, then: Vec::new(), otherwise: Vec::new() });
    }
}

fn branches<'a>(lines: &mut std::iter::Peekable<impl Iterator<Item = &'a str>>) -> Result<(Vec<Op>, Vec<Op>)> {
    let mut own = Vec::new();
    let mut depth = 0;
    loop {
        let line = lines.next().ok_or("an 'if' does not end")?;
        if depth == 0 && (line == "}" || line == "} else {") {
            let mut inner = own.into_iter().chain(["}"]).peekable();
            let then = ops(&mut inner)?;
            return Ok((then, if line == "}" { Vec::new() } else { ops(lines)? }));
        }
        depth += i32::from(line.ends_with('{')) - i32::from(line.starts_with('}'));
        own.push(line);
    }
}
