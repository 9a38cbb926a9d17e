//! Names of form fields with brackets, as trees: `a[b]`, `a[]`, `a[][b]`, `a[0][b]`.

use serde_json::{Map, Value};

use super::{MAX_DEPTH, check_name, invalid, shown};
use crate::serve::error::ApiError;

/// Fields of a form while they come.
#[derive(Debug, Default)]
pub(super) struct Branch {
    /// Value of this name itself.
    own: Option<String>,
    /// `[]`, in order.
    each: Vec<String>,
    /// `[key]` and what is below, in order.
    named: Vec<(String, Branch)>,
    /// `[][key]`, by key: the grouping is told by the order of each alone.
    of_each: Vec<(String, Branch)>,
}

/// Root and brackets of a name.
///
/// # Errors
/// Brackets that do not close, or that are too deep.
fn segments(name: &str) -> Result<(&str, Vec<&str>), ApiError> {
    let broken = || invalid(&shown(name), format!("field '{}': its brackets do not fit together", shown(name)));
    let (root, mut rest) = name.find('[').map_or((name, ""), |at| name.split_at(at));
    if root.is_empty() || root.contains(']') {
        return Err(broken());
    }
    let mut found = Vec::new();
    while !rest.is_empty() {
        let (inner, behind) = rest.strip_prefix('[').and_then(|r| r.split_once(']')).ok_or_else(broken)?;
        if inner.contains('[') || found.len() == MAX_DEPTH {
            let why = format!("field '{}': more than {MAX_DEPTH} brackets, or brackets in brackets", shown(name));
            return Err(invalid(&shown(name), why));
        }
        found.push(inner);
        rest = behind;
    }
    Ok((root, found))
}

/// The name of a field without its brackets.
pub(super) fn root(name: &str) -> Result<&str, ApiError> {
    check_name(name)?;
    segments(name).map(|(root, _)| root)
}

impl Branch {
    /// Adds a field.
    ///
    /// # Errors
    /// A name that cannot be read; a second value of one name.
    pub(super) fn add(&mut self, name: &str, value: String) -> Result<(), ApiError> {
        check_name(name)?;
        let (root, brackets) = segments(name)?;
        let mut at = self.named_or_new(root);
        let mut left = &brackets[..];
        loop {
            match left {
                [] if at.own.is_some() => {
                    let why = format!("field '{}' is given twice; a list has its values as '{root}[]'", shown(name));
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
                    // The place in the list follows when all are there.
                    child(&mut at.of_each, key).each.push(value);
                    return Ok(());
                }
                ["", ..] => {
                    let why = format!("field '{}': lists in lists are sent as JSON text in '{root}'", shown(name));
                    return Err(invalid(&shown(root), why));
                }
                [key, rest @ ..] => {
                    at = at.named_or_new(key);
                    left = rest;
                }
            }
        }
    }

    fn named_or_new(&mut self, key: &str) -> &mut Branch {
        child(&mut self.named, key)
    }

    /// All fields as a tree.
    ///
    /// # Errors
    /// A name that is both a value and more than one; lists whose grouping is lost.
    pub(super) fn finish(self) -> Result<Map<String, Value>, ApiError> {
        self.named.into_iter().map(|(name, branch)| Ok((name.clone(), branch.value(&name)?))).collect()
    }

    /// The value of a name; `root` names it in errors.
    fn value(self, root: &str) -> Result<Value, ApiError> {
        let Branch { own, each, named, of_each } = self;
        let forms = usize::from(own.is_some())
            + usize::from(!each.is_empty())
            + usize::from(!named.is_empty())
            + usize::from(!of_each.is_empty());
        if forms > 1 {
            let why = format!("field '{root}' comes both as a value and with brackets, or with brackets of two kinds");
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

fn child<'a>(children: &'a mut Vec<(String, Branch)>, key: &str) -> &'a mut Branch {
    let at = children.iter().position(|(own, _)| own == key).unwrap_or_else(|| {
        children.push((key.into(), Branch::default()));
        children.len() - 1
    });
    &mut children[at].1
}

/// A list of objects from the values of each key. Clients send all values of one key together, or all keys of one object: where
/// every object has every key, both are the same.
fn zipped(of_each: Vec<(String, Branch)>, root: &str) -> Result<Value, ApiError> {
    let count = of_each.first().map_or(0, |(_, branch)| branch.each.len());
    if of_each.iter().any(|(_, branch)| branch.each.len() != count) {
        let why = format!("field '{root}[]': which values belong together is lost; send '{root}' as JSON text");
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
