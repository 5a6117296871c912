//! Macros that define an item in Rust and describe it to [`mod@header`], which generates the C++ definition.

/// A constant, a struct, a set of codes or a formula, as the C++ header defines it.
#[cfg(test)]
#[derive(Debug, Clone, Copy)]
pub(crate) enum Item {
    Constant { name: &'static str, value: u64 },
    Codes { name: &'static str, codes: &'static [(&'static [&'static str], &'static str, u32)] },
    Formula { name: &'static str, arguments: &'static [&'static str], body: &'static str },
    Struct { name: &'static str, bytes: usize, fields: &'static [Field] },
}

/// A field of a struct.
#[cfg(test)]
#[derive(Debug, Clone, Copy)]
pub(crate) struct Field {
    pub(crate) doc: &'static [&'static str],
    pub(crate) name: &'static str,
    /// The type in Rust.
    pub(crate) rust: &'static str,
    /// The type in C++, if the field is an address.
    pub(crate) cpp: Option<&'static str>,
    pub(crate) offset: usize,
}

/// An item with its documentation.
#[cfg(test)]
#[derive(Debug, Clone, Copy)]
pub(crate) struct Described {
    pub(crate) doc: &'static [&'static str],
    pub(crate) item: Item,
}

/// Constants: `NAME: type = value`.
macro_rules! constants {
    ($list:ident: $($(#[doc = $doc:literal])* $name:ident: $ty:ty = $value:expr;)+) => {
        $(
            $(#[doc = $doc])*
            #[allow(dead_code, reason = "only kernels use some constants")]
            pub(crate) const $name: $ty = $value;
        )+

        #[cfg(test)]
        pub(crate) const $list: &[$crate::mirror::Described] = &[$($crate::mirror::Described {
            doc: &[$($doc),*],
            item: $crate::mirror::Item::Constant { name: stringify!($name), value: $name as u64 },
        }),+];
    };
}

/// Enums that are stored as `u32`: `Name = number as "NAME_IN_CPP"`. `of` returns the variant of a number.
macro_rules! codes {
    ($list:ident: $($(#[doc = $doc:literal])+ $name:ident {
        $($(#[doc = $code_doc:literal])* $code:ident = $number:literal as $cpp:literal,)+
    })+) => {
        $(
            $(#[doc = $doc])+
            #[derive(Debug, Clone, Copy, PartialEq, Eq)]
            #[repr(u32)]
            #[allow(dead_code, reason = "only kernels use some codes")]
            pub(crate) enum $name { $($(#[doc = $code_doc])* $code = $number,)+ }

            #[allow(dead_code, reason = "some codes are never read back")]
            impl $name {
                /// The code of this number.
                pub(crate) fn of(number: u32) -> Option<Self> {
                    match number {
                        $($number => Some(Self::$code),)+
                        _ => None,
                    }
                }
            }
        )+

        #[cfg(test)]
        pub(crate) const $list: &[$crate::mirror::Described] = &[$($crate::mirror::Described {
            doc: &[$($doc),+],
            item: $crate::mirror::Item::Codes {
                name: stringify!($name),
                codes: &[$((&[$($code_doc),*], $cpp, $number)),+],
            },
        }),+];
    };
}

/// Integer formulas in the common syntax of Rust and C++: numbers, constants, other formulas and operators.
macro_rules! formulas {
    ($list:ident: $($(#[doc = $doc:literal])+ fn $name:ident($($argument:ident),*) = $body:expr;)+) => {
        $(
            $(#[doc = $doc])+
            #[allow(clippy::manual_div_ceil, reason = "C++ has no such method")]
            #[allow(dead_code, reason = "only kernels use some formulas")]
            pub(crate) const fn $name($($argument: usize),*) -> usize { $body }
        )+

        #[cfg(test)]
        pub(crate) const $list: &[$crate::mirror::Described] = &[$($crate::mirror::Described {
            doc: &[$($doc),+],
            item: $crate::mirror::Item::Formula {
                name: stringify!($name),
                arguments: &[$(stringify!($argument)),*],
                body: stringify!($body),
            },
        }),+];
    };
}

/// Structs in C layout. A field that is an address names its C++ type: `rows: DeviceAddress as "const u8*"`.
macro_rules! structs {
    ($list:ident: $($(#[doc = $doc:literal])+ $(#[derive($($derive:path),+)])? $name:ident {
        $($(#[doc = $field_doc:literal])* $field:ident: $ty:ty $(as $cpp:literal)?,)+
    })+) => {
        $(
            $(#[doc = $doc])+
            #[repr(C)]
            #[derive(Debug, Clone, Copy $($(, $derive)+)?)]
            #[allow(dead_code, reason = "only kernels use some structs and fields")]
            pub(crate) struct $name { $($(#[doc = $field_doc])* pub(crate) $field: $ty,)+ }
        )+

        #[cfg(test)]
        pub(crate) const $list: &[$crate::mirror::Described] = &[$($crate::mirror::Described {
            doc: &[$($doc),+],
            item: $crate::mirror::Item::Struct {
                name: stringify!($name),
                bytes: size_of::<$name>(),
                fields: &[$($crate::mirror::Field {
                    doc: &[$($field_doc),*],
                    name: stringify!($field),
                    rust: stringify!($ty),
                    cpp: { let cpp: &[&'static str] = &[$($cpp)?]; cpp.first().copied() },
                    offset: ::std::mem::offset_of!($name, $field),
                }),+],
            },
        }),+];
    };
}

pub(crate) use {codes, constants, formulas, structs};

/// Generates the C++ header.
#[cfg(test)]
pub(crate) mod header {
    use std::fmt::Write as _;

    use super::{Described, Field, Item};

    /// The items in order, then assertions that both compilers lay structs out alike.
    pub(crate) fn of(items: &[Described]) -> String {
        let mut text = String::new();
        let mut asserts = String::new();
        let is_constant = |item: &Item| matches!(item, Item::Constant { .. });
        for (at, Described { doc, item }) in items.iter().enumerate() {
            // No blank line between constants.
            if !(is_constant(item) && at > 0 && is_constant(&items[at - 1].item)) {
                text.push('\n');
            }
            comment(&mut text, "", doc);
            match *item {
                Item::Constant { name, value } => {
                    line(&mut text, &format!("constexpr u32 {name} = {value};"))
                }
                Item::Codes { name, codes } => {
                    line(&mut text, &format!("enum {name} : u32 {{"));
                    for (doc, name, number) in codes {
                        comment(&mut text, "    ", doc);
                        line(&mut text, &format!("    {name} = {number},"));
                    }
                    line(&mut text, "};");
                }
                Item::Formula { name, arguments, body } => {
                    let arguments: Vec<_> =
                        arguments.iter().map(|argument| format!("u32 {argument}")).collect();
                    let arguments = arguments.join(", ");
                    let body = body.split_whitespace().collect::<Vec<_>>().join(" ");
                    line(&mut text, &format!("constexpr u32 {name}({arguments}) {{\n    return {body};\n}}"));
                }
                Item::Struct { name, bytes, fields } => {
                    line(&mut text, &format!("struct {name} {{"));
                    for field in fields {
                        comment(&mut text, "    ", field.doc);
                        line(&mut text, &format!("    {};", declaration(field)));
                        let Field { name: field, offset, .. } = field;
                        let place = format!("OFFSET_OF({name}, {field}) == {offset}");
                        line(&mut asserts, &format!("static_assert({place});"));
                    }
                    line(&mut text, "};");
                    let size = format!("sizeof({name}) == {bytes}");
                    line(&mut asserts, &format!("static_assert({size});"));
                }
            }
        }
        format!("{text}\n// The layout of these structs in src/params.rs.\n{asserts}")
    }

    /// A field as C++ declares it: `[[T; N]; 2]` becomes `T name[2][N]`.
    fn declaration(field: &Field) -> String {
        let (mut element, mut lengths) = (field.rust, String::new());
        while let Some((inner, length)) =
            element.strip_prefix('[').and_then(|rest| rest.strip_suffix(']')?.rsplit_once("; "))
        {
            let _ = write!(lengths, "[{length}]");
            element = inner;
        }
        let element = match (field.cpp, element) {
            (Some(cpp), "DeviceAddress") => cpp,
            (None, "DeviceAddress") => panic!("{}: an address needs a C++ type", field.name),
            (Some(_), other) => panic!("{}: {other} is not an address", field.name),
            (None, other) => other,
        };
        format!("{element} {}{lengths}", field.name)
    }

    fn comment(text: &mut String, indent: &str, doc: &[&str]) {
        for doc in doc {
            line(text, format!("{indent}//{doc}").trim_end());
        }
    }

    fn line(text: &mut String, line: &str) {
        text.push_str(line);
        text.push('\n');
    }

    #[test]
    fn array_dimensions_are_declared_outermost_first() {
        let field = |rust, cpp| Field { doc: &[], name: "name", rust, cpp, offset: 0 };
        assert_eq!(declaration(&field("u32", None)), "u32 name");
        assert_eq!(declaration(&field("[u32; MAX_RANKS + 1]", None)), "u32 name[MAX_RANKS + 1]");
        assert_eq!(declaration(&field("[[Handshake; MAX_RANKS]; 2]", None)), "Handshake name[2][MAX_RANKS]");
        assert_eq!(declaration(&field("[DeviceAddress; 3]", Some("u8*"))), "u8* name[3]");
    }
}
