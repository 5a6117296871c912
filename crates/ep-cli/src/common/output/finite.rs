//! Checks that all numbers of a result are finite. The error names the number that is not.

use std::fmt;

use serde::ser::{
    Error, Serialize, SerializeMap, SerializeSeq, SerializeStruct, SerializeStructVariant, SerializeTuple,
    SerializeTupleStruct, SerializeTupleVariant, Serializer,
};

use super::visible;
use crate::common::failure::Failure;

/// A text that may be written: all numbers in it are finite.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct Checked(String);

impl Checked {
    /// Serialises a value as JSON.
    pub(crate) fn json(value: &impl Serialize) -> Result<Self, Failure> {
        finite(value)?;
        serde_json::to_string_pretty(value)
            .map(|text| Self(visible::json(text)))
            .map_err(|error| Failure::request(format!("writing JSON: {error}")))
    }

    /// Checks a text. `names` are the parts from outside, which may contain words such as `inf`.
    pub(crate) fn text(text: String, names: &[&str]) -> Result<Self, Failure> {
        let refuse = |line: &str| {
            Failure::request(format!("a result is not finite in `{}`; use less extreme numbers", line.trim()))
        };
        match not_finite(&text) {
            None => Ok(Self(text)),
            Some(_) => {
                let odd = names.iter().filter(|name| not_finite(name).is_some());
                let figures = odd.fold(text.clone(), |text, name| text.replace(name, ""));
                not_finite(&figures).map_or(Ok(Self(text)), |line| Err(refuse(line)))
            }
        }
    }

    pub(crate) fn as_str(&self) -> &str {
        &self.0
    }
}

/// The first line with a number that is not finite, in Rust's notation, alone or as a multiple (`infx`).
fn not_finite(text: &str) -> Option<&str> {
    let is_figure = |word: &str| matches!(word, "NaN" | "inf" | "NaNx" | "infx");
    text.lines().find(|line| line.split(|letter: char| !letter.is_alphanumeric()).any(is_figure))
}

/// Checks that all numbers in a value are finite. The error gives the path of the number that is not.
pub(crate) fn finite(value: &impl Serialize) -> Result<(), Failure> {
    let mut path = String::new();
    value.serialize(Walk { path: &mut path }).map_err(|NotFinite(what)| {
        Failure::request(format!(
            "{what}: the numbers given are too extreme to compute with; use less extreme numbers"
        ))
    })
}

/// The error of a walk: path and value of the number.
#[derive(Debug)]
struct NotFinite(String);

impl fmt::Display for NotFinite {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.0)
    }
}

impl std::error::Error for NotFinite {}

impl Error for NotFinite {
    fn custom<T: fmt::Display>(message: T) -> Self {
        Self(message.to_string())
    }
}

type Walked = Result<(), NotFinite>;

/// A serializer that writes nothing and checks every number.
struct Walk<'p> {
    path: &'p mut String,
}

impl Walk<'_> {
    fn figure(self, value: f64) -> Walked {
        if value.is_finite() {
            return Ok(());
        }
        let place = if self.path.is_empty() { "the result" } else { &**self.path };
        Err(NotFinite(format!("{place} is {value}")))
    }
}

/// The parts of a compound value, numbered if they have no names.
struct Parts<'p> {
    path: &'p mut String,
    next: usize,
    /// In a map, the key of the next value.
    key: String,
}

impl<'p> From<Walk<'p>> for Parts<'p> {
    fn from(walk: Walk<'p>) -> Self {
        Self { path: walk.path, next: 0, key: String::new() }
    }
}

impl Parts<'_> {
    fn part(&mut self, name: &str, value: &(impl Serialize + ?Sized)) -> Walked {
        let length = self.path.len();
        self.path.push_str(name);
        value.serialize(Walk { path: self.path })?;
        self.path.truncate(length);
        Ok(())
    }

    fn field(&mut self, name: &str, value: &(impl Serialize + ?Sized)) -> Walked {
        let dot = if self.path.is_empty() { "" } else { "." };
        self.part(&format!("{dot}{name}"), value)
    }

    fn item(&mut self, value: &(impl Serialize + ?Sized)) -> Walked {
        let number = self.next;
        self.next += 1;
        self.part(&format!("[{number}]"), value)
    }
}

macro_rules! harmless {
    ($($method:ident: $type:ty),* $(,)?) => {
        $(fn $method(self, _: $type) -> Walked { Ok(()) })*
    };
}

impl<'p> Serializer for Walk<'p> {
    type Ok = ();
    type Error = NotFinite;
    type SerializeSeq = Parts<'p>;
    type SerializeTuple = Parts<'p>;
    type SerializeTupleStruct = Parts<'p>;
    type SerializeTupleVariant = Parts<'p>;
    type SerializeMap = Parts<'p>;
    type SerializeStruct = Parts<'p>;
    type SerializeStructVariant = Parts<'p>;

    harmless! {
        serialize_bool: bool, serialize_i8: i8, serialize_i16: i16, serialize_i32: i32, serialize_i64: i64,
        serialize_i128: i128, serialize_u8: u8, serialize_u16: u16, serialize_u32: u32, serialize_u64: u64,
        serialize_u128: u128, serialize_char: char, serialize_str: &str, serialize_bytes: &[u8],
        serialize_unit_struct: &'static str,
    }

    fn serialize_f32(self, value: f32) -> Walked {
        self.figure(f64::from(value))
    }

    fn serialize_f64(self, value: f64) -> Walked {
        self.figure(value)
    }

    fn serialize_none(self) -> Walked {
        Ok(())
    }

    fn serialize_some<T: Serialize + ?Sized>(self, value: &T) -> Walked {
        value.serialize(self)
    }

    fn serialize_unit(self) -> Walked {
        Ok(())
    }

    fn serialize_unit_variant(self, _: &'static str, _: u32, _: &'static str) -> Walked {
        Ok(())
    }

    fn serialize_newtype_struct<T: Serialize + ?Sized>(self, _: &'static str, value: &T) -> Walked {
        value.serialize(self)
    }

    fn serialize_newtype_variant<T: Serialize + ?Sized>(
        self,
        _: &'static str,
        _: u32,
        variant: &'static str,
        value: &T,
    ) -> Walked {
        Parts::from(self).field(variant, value)
    }

    fn serialize_seq(self, _: Option<usize>) -> Result<Parts<'p>, NotFinite> {
        Ok(self.into())
    }

    fn serialize_tuple(self, _: usize) -> Result<Parts<'p>, NotFinite> {
        self.serialize_seq(None)
    }

    fn serialize_tuple_struct(self, _: &'static str, _: usize) -> Result<Parts<'p>, NotFinite> {
        self.serialize_seq(None)
    }

    fn serialize_tuple_variant(
        self,
        _: &'static str,
        _: u32,
        _: &'static str,
        _: usize,
    ) -> Result<Parts<'p>, NotFinite> {
        self.serialize_seq(None)
    }

    fn serialize_map(self, _: Option<usize>) -> Result<Parts<'p>, NotFinite> {
        self.serialize_seq(None)
    }

    fn serialize_struct(self, _: &'static str, _: usize) -> Result<Parts<'p>, NotFinite> {
        self.serialize_seq(None)
    }

    fn serialize_struct_variant(
        self,
        _: &'static str,
        _: u32,
        _: &'static str,
        _: usize,
    ) -> Result<Parts<'p>, NotFinite> {
        self.serialize_seq(None)
    }
}

macro_rules! numbered {
    ($($of:ident::$method:ident),*) => {
        $(impl $of for Parts<'_> {
            type Ok = ();
            type Error = NotFinite;

            fn $method<T: Serialize + ?Sized>(&mut self, value: &T) -> Walked {
                self.item(value)
            }

            fn end(self) -> Walked {
                Ok(())
            }
        })*
    };
}

numbered! {
    SerializeSeq::serialize_element, SerializeTuple::serialize_element, SerializeTupleStruct::serialize_field,
    SerializeTupleVariant::serialize_field
}

macro_rules! named {
    ($($of:ident),*) => {
        $(impl $of for Parts<'_> {
            type Ok = ();
            type Error = NotFinite;

            fn serialize_field<T: Serialize + ?Sized>(&mut self, name: &'static str, value: &T) -> Walked {
                self.field(name, value)
            }

            fn end(self) -> Walked {
                Ok(())
            }
        })*
    };
}

named! { SerializeStruct, SerializeStructVariant }

impl SerializeMap for Parts<'_> {
    type Ok = ();
    type Error = NotFinite;

    fn serialize_key<T: Serialize + ?Sized>(&mut self, key: &T) -> Walked {
        let key = serde_json::to_value(key).map_err(NotFinite::custom)?;
        self.key = key.as_str().map_or_else(|| key.to_string(), str::to_owned);
        Ok(())
    }

    fn serialize_value<T: Serialize + ?Sized>(&mut self, value: &T) -> Walked {
        let key = std::mem::take(&mut self.key);
        self.field(&key, value)
    }

    fn end(self) -> Walked {
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[derive(serde::Serialize)]
    struct Report {
        plan: Plan,
        notes: Vec<&'static str>,
    }

    #[derive(serde::Serialize)]
    struct Plan {
        levels: Vec<Option<f64>>,
        #[serde(flatten)]
        more: std::collections::BTreeMap<&'static str, f32>,
    }

    fn report(last: f64, more: f32) -> Report {
        let plan = Plan { levels: vec![None, Some(1.0), Some(last)], more: [("x", more)].into() };
        Report { plan, notes: vec!["NaN is a name"] }
    }

    #[test]
    fn the_number_that_is_not_finite_is_named() {
        assert!(Checked::json(&report(1.0, 1.0)).is_ok());
        for (report, named) in [
            (report(f64::NAN, 1.0), "plan.levels[2] is NaN"),
            (report(f64::INFINITY, 1.0), "plan.levels[2] is inf"),
            (report(1.0, f32::NEG_INFINITY), "plan.x is -inf"),
        ] {
            let message = Checked::json(&report).unwrap_err().to_string();
            assert!(message.contains(named) && message.contains("too extreme"), "{message}");
        }
    }

    #[test]
    fn text_with_numbers_that_are_not_finite_is_refused_but_names_may_look_like_them() {
        for wrong in ["a\n  takes NaN µs\nb", "inf PB", "faster by infx", "<path d=\"M NaN,3\"/>"] {
            let message = Checked::text(wrong.into(), &["fine"]).unwrap_err().to_string();
            assert!(message.contains("not finite"), "{message}");
        }
        let right = "info: inform NaNny of 3 infections";
        assert_eq!(Checked::text(right.into(), &[]).unwrap().as_str(), right);
        assert!(Checked::text("model NaN on inf: 3 ms".into(), &["NaN", "inf"]).is_ok());
        assert!(Checked::text("model NaN: inf ms".into(), &["NaN"]).is_err());
    }
}
