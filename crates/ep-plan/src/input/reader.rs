//! Reads tables of an input file key by key. Every error has its place, from the spans that `toml` keeps.

use std::collections::BTreeMap;
use std::ops::Range;

use toml::Spanned;
use toml::de::{DeTable, DeValue};

use super::error::{InputError, Problem, Source};
use super::quantity::Kind;
use crate::limits::{self, Count, Number, Shown};

type Result<T> = std::result::Result<T, InputError>;

/// The keys that a table may have.
#[derive(Debug, Clone, Copy)]
pub(super) struct Keys {
    /// Keys without a unit.
    pub(super) plain: &'static [&'static str],
    /// Keys of quantities, which may have their unit as a suffix.
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

    /// The problem for an unknown key. It suggests the closest allowed key.
    fn problem(&self, key: &str) -> Problem {
        let names = self.names();
        let close = names.iter().map(|name| (distance(name, key), name)).min();
        let suggestion = match close {
            Some((edits, name)) if edits <= name.len() / 3 => format!("{name}; "),
            _ => String::new(),
        };
        Problem::new("unknown key", format!("{suggestion}all keys here: {}", names.join(", ")))
    }
}

/// A value with its dotted key and its place.
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
            DeValue::String(_) => "a string",
            DeValue::Integer(_) | DeValue::Float(_) => "a number",
            DeValue::Boolean(_) => "a boolean",
            DeValue::Datetime(_) => "a date",
            DeValue::Array(_) => "an array",
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
            _ => self.fail(Problem::new("is not a finite number", needed)),
        }
    }

    pub(super) fn count(&self, range: Count) -> Result<usize> {
        let DeValue::Integer(number) = self.value else { return self.mistyped(&range.to_string()) };
        match integer(number.as_str(), number.radix()).and_then(|number| usize::try_from(number).ok()) {
            Some(number) if range.allows(number) => Ok(number),
            _ => self.fail(Problem::new(format!("is {}", number.as_str()), range.to_string())),
        }
    }

    pub(super) fn number_in(&self, range: Number) -> Result<f64> {
        let needed = format!("a number {range}");
        let number = self.number(&needed)?;
        if range.allows(number) {
            Ok(number)
        } else {
            self.fail(Problem::new(format!("is {}", Shown(number)), needed))
        }
    }

    /// A name: short and without control characters, because reports print it to terminals and tables.
    pub(super) fn name(&self) -> Result<&'d str> {
        let name = self.text("a string in quotes")?;
        if name.chars().any(char::is_control) {
            let possible = "letters, digits, spaces and punctuation";
            return self.fail(Problem::new("has a control character", possible));
        }
        match name.chars().count() {
            length if length > limits::NAME => {
                let needed = format!("at most {} characters", limits::NAME);
                self.fail(Problem::new(format!("has {length} characters"), needed))
            }
            _ => Ok(name),
        }
    }

    pub(super) fn list(&self, needed: &str) -> Result<Vec<Item<'d, 'i>>> {
        let Some(items) = self.value.as_array() else { return self.mistyped(needed) };
        let item = |(index, value)| Item::new(self.source, format!("{}[{index}]", self.path), value);
        Ok(items.iter().enumerate().map(item).collect())
    }

    /// The items of a list with one entry per site, that is, per member of the outermost level.
    fn entries(&self, sites: Option<usize>, needed: &str) -> Result<Vec<Item<'d, 'i>>> {
        let entries = self.list(needed)?;
        match sites {
            Some(sites) if entries.len() == sites => Ok(entries),
            Some(sites) => {
                let possible =
                    format!("{sites} entries, one per member of the outermost level, or a single value");
                let count = entries.len();
                let noun = if count == 1 { "entry" } else { "entries" };
                self.fail(Problem::new(format!("has {count} {noun}"), possible))
            }
            None => self.mistyped(needed),
        }
    }

    pub(super) fn table(&self, keys: Keys) -> Result<Table<'d, 'i>> {
        let Some(table) = self.value.as_table() else { return self.mistyped("a table") };
        Table::new(self.source, self.path.clone(), self.span.clone(), table, keys)
    }

    /// The meaning of a value that must be one of these words.
    pub(super) fn word<T: Copy>(&self, words: &[(&str, T)]) -> Result<T> {
        let all = words.iter().map(|(word, _)| format!("\"{word}\"")).collect::<Vec<_>>().join(", ");
        let found = self.text(&all)?;
        match words.iter().find(|(word, _)| *word == found) {
            Some((_, meaning)) => Ok(*meaning),
            None => self.fail(Problem::new(format!("\"{found}\" is unknown"), all)),
        }
    }
}

/// The value of a TOML integer.
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
    /// Checks all keys before any value, so that a misspelt key is reported as unknown and not as missing.
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

    /// An error at this key, or at the table if the key is absent.
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
            (Some(item), _) => item.name().map(str::to_owned),
            (None, Some(default)) => Ok(default.to_owned()),
            (None, None) => self.missing(key, "\"a name\""),
        }
    }

    pub(super) fn count(&self, key: &str, default: Option<usize>, range: Count) -> Result<usize> {
        match (self.get(key), default) {
            (Some(item), _) => item.count(range),
            (None, Some(default)) => Ok(default),
            (None, None) => self.missing(key, &range.to_string()),
        }
    }

    pub(super) fn optional_count(&self, key: &str, range: Count) -> Result<Option<usize>> {
        self.get(key).map(|item| item.count(range)).transpose()
    }

    pub(super) fn number(&self, key: &str, default: f64, range: Number) -> Result<f64> {
        self.get(key).map_or(Ok(default), |item| item.number_in(range))
    }

    pub(super) fn word<T: Copy>(&self, key: &str, default: T, words: &[(&str, T)]) -> Result<T> {
        self.get(key).map_or(Ok(default), |item| item.word(words))
    }

    /// A quantity with its unit in the value or in the key.
    pub(super) fn quantity(&self, base: &str, default: Option<f64>, range: Number) -> Result<f64> {
        let optional = self.optional_quantity(base, range)?;
        match (optional.or(default), self.kind(base)) {
            (Some(value), _) => Ok(value),
            (None, kind) => self.missing(base, kind.map_or("", Kind::examples)),
        }
    }

    pub(super) fn optional_quantity(&self, base: &str, range: Number) -> Result<Option<f64>> {
        let Some(kind) = self.kind(base) else { return Ok(None) };
        let Some((item, unit)) = self.written_once(base, kind)? else { return Ok(None) };
        quantity(item, unit, base, kind, range).map(Some)
    }

    /// A quantity, or a list of quantities with one entry per site.
    pub(super) fn quantities(&self, base: &str, sites: Option<usize>, range: Number) -> Result<Vec<f64>> {
        let Some(kind) = self.kind(base) else { return Ok(Vec::new()) };
        match self.written_once(base, kind)? {
            None => self.missing(base, kind.examples()),
            Some((item, unit)) if item.value.is_array() => {
                let entries = item.entries(sites, kind.examples())?;
                entries.iter().map(|entry| quantity(entry, unit, base, kind, range)).collect()
            }
            Some((item, unit)) => Ok(vec![quantity(item, unit, base, kind, range)?]),
        }
    }

    /// A count, or a list of counts with one entry per site.
    pub(super) fn counts(&self, key: &str, sites: Option<usize>, range: Count) -> Result<Vec<usize>> {
        match self.get(key) {
            None => self.missing(key, &range.to_string()),
            Some(item) if item.value.is_array() => {
                item.entries(sites, &range.to_string())?.iter().map(|entry| entry.count(range)).collect()
            }
            Some(item) => Ok(vec![item.count(range)?]),
        }
    }

    /// The item that gives this quantity, with the unit that its key names.
    fn written_once(&self, base: &str, kind: Kind) -> Result<Option<(&Item<'d, 'i>, Option<&'static str>)>> {
        let written = self.written(base, kind);
        if let [(first, _), (second, _), ..] = &*written {
            let key = |item: &Item<'_, '_>| item.path.rsplit('.').next().unwrap_or_default().to_owned();
            let possible = format!("{} or {}, not both", key(first), key(second));
            return second.fail(Problem::new(format!("`{base}` is given twice"), possible));
        }
        Ok(written.first().copied())
    }

    /// The items that give this quantity, each with the unit that its key names.
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

/// The value of a quantity. `unit` is that of its key, if the key names one.
fn quantity(
    item: &Item<'_, '_>,
    unit: Option<&'static str>,
    base: &str,
    kind: Kind,
    range: Number,
) -> Result<f64> {
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
        Ok(value) if range.allows(value) => Ok(value),
        Ok(value) => {
            let unit = kind.unit();
            item.fail(Problem::new(format!("is {} {unit}", Shown(value)), format!("{range} {unit}")))
        }
    }
}

fn join(path: &str, key: &str) -> String {
    if path.is_empty() { key.to_owned() } else { format!("{path}.{key}") }
}

/// Edit distance: the least number of letters to insert, remove or replace to get from one word to another.
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
