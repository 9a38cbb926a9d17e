//! Expands the names of form fields that contain brackets into trees: `a[b]`, `a[]`, `a[][b]`, `a[0][b]`.

use serde_json::{Map, Value};

use super::{MAX_DEPTH, check_name, invalid, shown};
use crate::error::ApiError;

/// A node of the tree into which form fields are expanded.
#[derive(Debug, Default)]
pub(super) struct FormNode {
    /// Value of the name itself, without further brackets.
    own: Option<String>,
    /// Values of `name[]`, in the order in which they were sent.
    each: Vec<String>,
    /// Child nodes for `name[key]`, in the order in which they were sent.
    named: Vec<(String, FormNode)>,
    /// Values of `[][key]`, grouped by key. Only the order of the values determines which object a value belongs to.
    of_each: Vec<(String, FormNode)>,
}

/// Splits a name into its root and the contents of its brackets. Fails if brackets are unbalanced, nested or too many.
fn segments(name: &str) -> Result<(&str, Vec<&str>), ApiError> {
    let broken = || invalid(&shown(name), format!("field '{}': unbalanced brackets", shown(name)));
    let (root, mut rest) = name.find('[').map_or((name, ""), |at| name.split_at(at));
    if root.is_empty() || root.contains(']') {
        return Err(broken());
    }
    let mut found = Vec::new();
    while !rest.is_empty() {
        let (inner, behind) = rest.strip_prefix('[').and_then(|r| r.split_once(']')).ok_or_else(broken)?;
        if inner.contains('[') || found.len() == MAX_DEPTH {
            let why = format!("field '{}': more than {MAX_DEPTH} brackets, or nested brackets", shown(name));
            return Err(invalid(&shown(name), why));
        }
        found.push(inner);
        rest = behind;
    }
    Ok((root, found))
}

/// Returns a field name without its brackets.
pub(super) fn root(name: &str) -> Result<&str, ApiError> {
    check_name(name)?;
    segments(name).map(|(root, _)| root)
}

impl FormNode {
    /// Adds a field. Fails on a malformed name or a duplicate value.
    pub(super) fn add(&mut self, name: &str, value: String) -> Result<(), ApiError> {
        check_name(name)?;
        let (root, brackets) = segments(name)?;
        let mut at = self.named_or_new(root);
        let mut left = &brackets[..];
        loop {
            match left {
                [] if at.own.is_some() => {
                    let why = format!("field '{}' occurs twice; send the values of a list as '{root}[]'", shown(name));
                    return Err(invalid(&shown(root), why));
                }
                [] => {
                    at.own = Some(value);
                    return Ok(());
                }
                [""] => {
                    at.each.push(value);
                    return Ok(());
                }
                ["", key] if !key.is_empty() => {
                    // `zipped` combines these values into objects once all of them are known.
                    child(&mut at.of_each, key).each.push(value);
                    return Ok(());
                }
                ["", ..] => {
                    let why =
                        format!("field '{}': nested lists are not supported; send '{root}' as JSON text", shown(name));
                    return Err(invalid(&shown(root), why));
                }
                [key, rest @ ..] => {
                    at = at.named_or_new(key);
                    left = rest;
                }
            }
        }
    }

    fn named_or_new(&mut self, key: &str) -> &mut FormNode {
        child(&mut self.named, key)
    }

    /// Returns all fields as a tree. Fails if a name occurs in several forms, such as `a` and `a[b]`, or if a list of
    /// objects is ambiguous.
    pub(super) fn finish(self) -> Result<Map<String, Value>, ApiError> {
        self.named.into_iter().map(|(name, branch)| Ok((name.clone(), branch.value(&name)?))).collect()
    }

    /// Converts a node into a JSON value; `root` is the field name for error messages.
    fn value(self, root: &str) -> Result<Value, ApiError> {
        let FormNode { own, each, named, of_each } = self;
        let forms = usize::from(own.is_some())
            + usize::from(!each.is_empty())
            + usize::from(!named.is_empty())
            + usize::from(!of_each.is_empty());
        if forms > 1 {
            let why = format!(
                "field '{root}' is sent in several forms: as a value and with brackets, or with different brackets"
            );
            return Err(invalid(root, why));
        }
        if let Some(own) = own {
            return Ok(own.into());
        }
        if !of_each.is_empty() {
            return zipped(of_each, root);
        }
        if named.is_empty() {
            return Ok(each.into());
        }
        let numbered = named.iter().enumerate().all(|(at, (key, _))| *key == at.to_string());
        let values = named.into_iter().map(|(key, branch)| Ok((key, branch.value(root)?)));
        let values: Map<String, Value> = values.collect::<Result<_, ApiError>>()?;
        Ok(match numbered {
            true => Value::Array(values.into_iter().map(|(_, value)| value).collect()),
            false => Value::Object(values),
        })
    }
}

fn child<'a>(children: &'a mut Vec<(String, FormNode)>, key: &str) -> &'a mut FormNode {
    let at = children.iter().position(|(own, _)| own == key).unwrap_or_else(|| {
        children.push((key.into(), FormNode::default()));
        children.len() - 1
    });
    &mut children[at].1
}

/// Builds a list of objects from the values of each key. Some clients send all values of a key before those of the next
/// key, others send one object after another. If every object has every key, both orders give the same list.
fn zipped(of_each: Vec<(String, FormNode)>, root: &str) -> Result<Value, ApiError> {
    let count = of_each.first().map_or(0, |(_, branch)| branch.each.len());
    if of_each.iter().any(|(_, branch)| branch.each.len() != count) {
        let why =
            format!("field '{root}[]': ambiguous list, because some objects lack a key; send '{root}' as JSON text");
        return Err(invalid(root, why));
    }
    let mut objects = vec![Map::new(); count];
    for (key, branch) in of_each {
        for (object, value) in objects.iter_mut().zip(branch.each) {
            object.insert(key.clone(), value.into());
        }
    }
    Ok(objects.into_iter().map(Value::Object).collect())
}
