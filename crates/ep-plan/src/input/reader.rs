//! A table of an input file, read key by key: every error knows its place.

use std::collections::BTreeMap;
use std::ops::Range;

use toml::Spanned;
use toml::de::{DeTable, DeValue};

use super::error::{InputError, Problem, Source};
use super::quantity::Kind;

type Result<T> = std::result::Result<T, InputError>;

/// The keys that a table may have.
#[derive(Debug, Clone, Copy)]
pub(super) struct Keys {
    /// Keys that are written as they are.
    pub(super) plain: &'static [&'static str],
    /// Keys of quantities, which may also carry their unit in the name.
    pub(super) quantities: &'static [(&'static str, Kind)],
}

impl Keys {
    fn allows(&self, key: &str) -> bool {
        let suffixed = |(base, kind): &(&str, Kind)| {
            key.strip_prefix(base).is_some_and(|rest| {
                rest.is_empty() || kind.suffixes().iter().any(|(suffix, _)| rest == format!("_{suffix}"))
            })
        };
        self.plain.contains(&key) || self.quantities.iter().any(suffixed)
    }

    fn names(&self) -> Vec<&'static str> {
        self.plain.iter().copied().chain(self.quantities.iter().map(|(base, _)| *base)).collect()
    }

    /// What a key that is not allowed may have been meant to be.
    fn problem(&self, key: &str) -> Problem {
        let names = self.names();
        let close = names.iter().map(|name| (distance(name, key), name)).min();
        let meant = match close {
            Some((edits, name)) if edits <= name.len() / 3 => format!("{name}; "),
            _ => String::new(),
        };
        Problem::new("no such key", format!("{meant}all keys here: {}", names.join(", ")))
    }
}

/// A value with its key and its place.
#[derive(Debug, Clone)]
pub(super) struct Item<'d, 'i> {
    source: Source<'i>,
    pub(super) path: String,
    pub(super) span: Range<usize>,
    pub(super) value: &'d DeValue<'i>,
}

impl<'d, 'i> Item<'d, 'i> {
    pub(super) fn new(source: Source<'i>, path: String, value: &'d Spanned<DeValue<'i>>) -> Self {
        Self { source, path, span: value.span(), value: value.get_ref() }
    }

    pub(super) fn fail<T>(&self, problem: Problem) -> Result<T> {
        Err(self.source.error(&self.span, self.path.as_str(), problem))
    }

    fn mistyped<T>(&self, needed: &str) -> Result<T> {
        let found = match self.value {
            DeValue::String(_) => "a text",
            DeValue::Integer(_) | DeValue::Float(_) => "a number",
            DeValue::Boolean(_) => "true or false",
            DeValue::Datetime(_) => "a date",
            DeValue::Array(_) => "a list",
            DeValue::Table(_) => "a table",
        };
        self.fail(Problem::new(format!("is {found}"), needed))
    }

    pub(super) fn text(&self, needed: &str) -> Result<&'d str> {
        self.value.as_str().map_or_else(|| self.mistyped(needed), Ok)
    }

    pub(super) fn number(&self, needed: &str) -> Result<f64> {
        let written = match self.value {
            DeValue::Integer(number) => integer(number.as_str(), number.radix()).map(|number| number as f64),
            DeValue::Float(number) => number.as_str().parse().ok(),
            _ => return self.mistyped(needed),
        };
        match written {
            Some(number) if number.is_finite() => Ok(number),
            _ => self.fail(Problem::new("is no finite number", needed)),
        }
    }

    pub(super) fn count(&self) -> Result<usize> {
        const NEEDED: &str = "a whole number, at least 1";
        let DeValue::Integer(number) = self.value else { return self.mistyped(NEEDED) };
        match integer(number.as_str(), number.radix()).and_then(|number| usize::try_from(number).ok()) {
            Some(number) if number > 0 => Ok(number),
            _ => self.fail(Problem::new(format!("is {}", number.as_str()), NEEDED)),
        }
    }

    pub(super) fn list(&self, needed: &str) -> Result<Vec<Item<'d, 'i>>> {
        let Some(items) = self.value.as_array() else { return self.mistyped(needed) };
        let item = |(index, value)| Item::new(self.source, format!("{}[{index}]", self.path), value);
        Ok(items.iter().enumerate().map(item).collect())
    }

    pub(super) fn table(&self, keys: Keys) -> Result<Table<'d, 'i>> {
        let Some(table) = self.value.as_table() else { return self.mistyped("a table") };
        Table::new(self.source, self.path.clone(), self.span.clone(), table, keys)
    }

    /// One of these words.
    pub(super) fn word<T: Copy>(&self, words: &[(&str, T)]) -> Result<T> {
        let all = words.iter().map(|(word, _)| format!("\"{word}\"")).collect::<Vec<_>>().join(", ");
        let found = self.text(&all)?;
        match words.iter().find(|(word, _)| *word == found) {
            Some((_, meaning)) => Ok(*meaning),
            None => self.fail(Problem::new(format!("\"{found}\" is unknown"), all)),
        }
    }
}

/// A whole number as TOML writes it.
fn integer(digits: &str, radix: u32) -> Option<i64> {
    i64::from_str_radix(digits, radix).ok()
}

/// A table whose keys are all allowed.
#[derive(Debug, Clone)]
pub(super) struct Table<'d, 'i> {
    source: Source<'i>,
    path: String,
    span: Range<usize>,
    items: BTreeMap<String, Item<'d, 'i>>,
    keys: Keys,
}

impl<'d, 'i> Table<'d, 'i> {
    /// Checks the keys before the values: a misspelt key is not reported as a missing one.
    pub(super) fn new(
        source: Source<'i>,
        path: String,
        span: Range<usize>,
        table: &'d DeTable<'i>,
        keys: Keys,
    ) -> Result<Self> {
        let mut items = BTreeMap::new();
        for (key, value) in table {
            let name = key.get_ref().as_ref();
            let full = join(&path, name);
            if !keys.allows(name) {
                return Err(source.error(&key.span(), full, keys.problem(name)));
            }
            items.insert(name.to_owned(), Item::new(source, full, value));
        }
        Ok(Self { source, path, span, items, keys })
    }

    pub(super) fn get(&self, key: &str) -> Option<&Item<'d, 'i>> {
        self.items.get(key)
    }

    /// An error about the table as a whole.
    pub(super) fn fail<T>(&self, problem: Problem) -> Result<T> {
        Err(self.source.error(&self.span, self.path.as_str(), problem))
    }

    /// An error at this key; about the table where the key was left out.
    pub(super) fn fail_at<T>(&self, key: &str, problem: Problem) -> Result<T> {
        match self.get(key) {
            Some(item) => item.fail(problem),
            None => self.fail(problem),
        }
    }

    pub(super) fn missing<T>(&self, key: &str, needed: &str) -> Result<T> {
        let problem = Problem::new(format!("`{key}` is missing"), format!("{key} = {needed}"));
        Err(self.source.error(&self.span, self.path.as_str(), problem))
    }

    pub(super) fn text(&self, key: &str, default: Option<&str>) -> Result<String> {
        match (self.get(key), default) {
            (Some(item), _) => item.text("a text in quotes").map(str::to_owned),
            (None, Some(default)) => Ok(default.to_owned()),
            (None, None) => self.missing(key, "\"a name\""),
        }
    }

    pub(super) fn count(&self, key: &str, default: Option<usize>) -> Result<usize> {
        match (self.get(key), default) {
            (Some(item), _) => item.count(),
            (None, Some(default)) => Ok(default),
            (None, None) => self.missing(key, "a whole number, at least 1"),
        }
    }

    pub(super) fn number(&self, key: &str, default: f64, range: Range<f64>, needed: &str) -> Result<f64> {
        let Some(item) = self.get(key) else { return Ok(default) };
        let number = item.number(needed)?;
        if range.contains(&number) {
            return Ok(number);
        }
        item.fail(Problem::new(format!("is {number}"), needed))
    }

    pub(super) fn word<T: Copy>(&self, key: &str, default: T, words: &[(&str, T)]) -> Result<T> {
        self.get(key).map_or(Ok(default), |item| item.word(words))
    }

    /// A quantity, written with its unit in the value or in the key; above zero, or not below it.
    pub(super) fn quantity(&self, base: &str, default: Option<f64>, may_be_zero: bool) -> Result<f64> {
        let optional = self.optional_quantity(base, may_be_zero)?;
        match (optional.or(default), self.kind(base)) {
            (Some(value), _) => Ok(value),
            (None, kind) => self.missing(base, kind.map_or("", Kind::examples)),
        }
    }

    pub(super) fn optional_quantity(&self, base: &str, may_be_zero: bool) -> Result<Option<f64>> {
        let Some(kind) = self.kind(base) else { return Ok(None) };
        let written = self.written(base, kind);
        if let [_, second, ..] = &*written {
            let problem = Problem::new(format!("`{base}` is given twice"), "one of the two");
            return second.0.fail(problem);
        }
        let Some((item, unit)) = written.first() else { return Ok(None) };
        let value = match unit {
            Some(unit) => kind.read(&format!("{} {unit}", item.number("a number")?)),
            None => match item.value {
                DeValue::Integer(_) | DeValue::Float(_) => {
                    let names: Vec<_> =
                        kind.suffixes().iter().map(|(suffix, _)| format!("{base}_{suffix}")).collect();
                    let possible = format!("{}, or the key {}", kind.examples(), names.join(" or "));
                    Err(Problem::new("is a number without a unit", possible))
                }
                _ => kind.read(item.text(kind.examples())?),
            },
        };
        match value {
            Err(problem) => item.fail(problem),
            Ok(value) if value > 0.0 || (may_be_zero && value == 0.0) => Ok(Some(value)),
            Ok(value) => {
                let needed = if may_be_zero { "zero or more" } else { "more than zero" };
                item.fail(Problem::new(format!("is {value} {}", kind.unit()), needed))
            }
        }
    }

    /// The items that give this quantity, with the unit that the key names.
    fn written(&self, base: &str, kind: Kind) -> Vec<(&Item<'d, 'i>, Option<&'static str>)> {
        let suffixed = kind.suffixes().iter().map(|(suffix, unit)| (format!("{base}_{suffix}"), Some(*unit)));
        std::iter::once((base.to_owned(), None))
            .chain(suffixed)
            .filter_map(|(key, unit)| Some((self.get(&key)?, unit)))
            .collect()
    }

    fn kind(&self, base: &str) -> Option<Kind> {
        self.keys.quantities.iter().find(|(name, _)| *name == base).map(|(_, kind)| *kind)
    }
}

fn join(path: &str, key: &str) -> String {
    if path.is_empty() { key.to_owned() } else { format!("{path}.{key}") }
}

/// Letters to insert, remove or replace to get from one word to another.
fn distance(from: &str, to: &str) -> usize {
    let to: Vec<char> = to.chars().collect();
    let mut row: Vec<usize> = (0..=to.len()).collect();
    for (line, letter) in from.chars().enumerate() {
        let mut diagonal = row[0];
        row[0] = line + 1;
        for (column, other) in to.iter().enumerate() {
            let replaced = diagonal + usize::from(letter != *other);
            diagonal = row[column + 1];
            row[column + 1] = replaced.min(row[column] + 1).min(diagonal + 1);
        }
    }
    row[to.len()]
}

#[cfg(test)]
mod tests {
    use super::distance;

    #[test]
    fn distances_count_edits() {
        assert_eq!(distance("bandwidth", "bandwith"), 1);
        assert_eq!(distance("", "abc"), 3);
        assert_eq!(distance("topk", "top_k"), 1);
        assert_eq!(distance("same", "same"), 0);
    }
}
