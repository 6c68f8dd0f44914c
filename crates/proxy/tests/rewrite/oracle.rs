//! An independent reading of JSON by serde_json, and generators of JSON text in every legal spelling.

use std::fmt;

use proptest::prelude::*;
use serde::de::{Deserialize, Deserializer, MapAccess, Visitor};
use serde_json::value::RawValue;

/// An object's members in order, duplicates kept, values as spelled.
#[derive(Debug, PartialEq, Eq)]
pub(crate) struct Pairs(pub(crate) Vec<(String, String)>);

impl Pairs {
    pub(crate) fn read(text: &str) -> Self {
        serde_json::from_str(text).unwrap()
    }
}

impl<'de> Deserialize<'de> for Pairs {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        struct Collect;
        impl<'de> Visitor<'de> for Collect {
            type Value = Pairs;

            fn expecting(&self, out: &mut fmt::Formatter<'_>) -> fmt::Result {
                out.write_str("an object")
            }

            fn visit_map<A: MapAccess<'de>>(self, mut map: A) -> Result<Pairs, A::Error> {
                let mut pairs = Vec::new();
                while let Some((key, value)) = map.next_entry::<String, Box<RawValue>>()? {
                    pairs.push((key, value.get().to_owned()));
                }
                Ok(Pairs(pairs))
            }
        }
        deserializer.deserialize_map(Collect)
    }
}

pub(crate) fn is_blank(raw: &str) -> bool {
    raw == "null" || raw.starts_with('{') && Pairs::read(raw).0.is_empty()
}

/// The value without white space between tokens, and without non-blank hand-offs if `strip`.
pub(crate) fn canonical(raw: &str, strip: bool) -> String {
    match raw.as_bytes()[0] {
        b'{' => {
            let members: Vec<_> = Pairs::read(raw)
                .0
                .into_iter()
                .filter(|(key, value)| !(strip && key == "kv_transfer_params" && !is_blank(value)))
                .map(|(key, value)| format!("{key:?}:{}", canonical(&value, strip)))
                .collect();
            format!("{{{}}}", members.join(","))
        }
        b'[' => {
            let items: Vec<Box<RawValue>> = serde_json::from_str(raw).unwrap();
            let items: Vec<_> = items.iter().map(|item| canonical(item.get(), strip)).collect();
            format!("[{}]", items.join(","))
        }
        _ => raw.to_owned(),
    }
}

pub(crate) fn white() -> impl Strategy<Value = String> {
    prop_oneof![4 => Just(String::new()), 1 => "[ \n\t\r]{1,3}"]
}

pub(crate) fn number() -> impl Strategy<Value = String> {
    prop_oneof![
        Just("1e5".to_owned()),
        Just("1.0".to_owned()),
        Just("-0".to_owned()),
        Just("1".to_owned()),
        Just("2".to_owned()),
        "-?(0|[1-9][0-9]{0,40})(\\.[0-9]{1,20})?([eE][+-]?[0-9]{1,4})?",
    ]
}

/// The inside of a string: plain, escaped, and surrogate escapes in pairs only if `paired`.
fn inside(paired: bool) -> impl Strategy<Value = String> {
    let piece = prop_oneof![
        4 => "[a-z_]{1,6}",
        1 => "[\u{20}-\u{21}\u{23}-\u{5b}\u{5d}-\u{10ffff}]{1,3}",
        1 => prop::sample::select(vec!["\\n", "\\\"", "\\\\", "\\/", "\\b", "\\f", "\\r", "\\t"]).prop_map(str::to_owned),
        1 => "\\\\u00[0-9a-fA-F]{2}",
        1 => Just("\\ud83d\\ude00".to_owned()),
        1 => Just(if paired { "\\u00e9" } else { "\\udc00" }.to_owned()),
    ];
    prop::collection::vec(piece, 0..4).prop_map(|pieces| pieces.concat())
}

const KNOWN: [&str; 24] = [
    "model",
    "stream",
    "stream_options",
    "max_tokens",
    "max_completion_tokens",
    "max_output_tokens",
    "min_tokens",
    "min_completion_tokens",
    "stop",
    "stop_token_ids",
    "ignore_eos",
    "kv_transfer_params",
    "n",
    "best_of",
    "use_beam_search",
    "prompt",
    "prompt_embeds",
    "prompt_logprobs",
    "echo",
    "logprobs",
    "extra_body",
    "vllm_xargs",
    "extra_args",
    "sampling_params",
];

/// A key as spelled: known or not, some characters as escapes.
pub(crate) fn key() -> impl Strategy<Value = String> {
    let known = (prop::sample::select(&KNOWN[..]), prop::option::weighted(0.3, any::<prop::sample::Index>()))
        .prop_map(|(name, escaped)| match escaped {
            None => name.to_owned(),
            Some(index) => {
                let at = index.index(name.len());
                format!("{}\\u{:04x}{}", &name[..at], name.as_bytes()[at], &name[at + 1..])
            }
        });
    prop_oneof![2 => known, 1 => inside(true), 1 => Just("kv_transfer_params".to_owned())]
}

pub(crate) fn object_of(value: BoxedStrategy<String>, most: usize) -> BoxedStrategy<String> {
    let member = (white(), key(), white(), white(), value, white())
        .prop_map(|(a, key, b, c, value, d)| format!("{a}\"{key}\"{b}:{c}{value}{d}"));
    (prop::collection::vec(member, 0..most), white())
        .prop_map(|(members, empty)| {
            let inside = if members.is_empty() { empty } else { members.join(",") };
            format!("{{{inside}}}")
        })
        .boxed()
}

/// Any JSON value as text.
pub(crate) fn value() -> BoxedStrategy<String> {
    let leaf = prop_oneof![
        Just("null".to_owned()),
        Just("true".to_owned()),
        Just("false".to_owned()),
        Just("{}".to_owned()),
        number(),
        inside(false).prop_map(|inside| format!("\"{inside}\"")),
    ];
    leaf.prop_recursive(4, 24, 4, |inner| {
        let item = (white(), inner.clone(), white()).prop_map(|(a, item, b)| format!("{a}{item}{b}"));
        let list = (prop::collection::vec(item, 0..4), white()).prop_map(|(items, empty)| {
            let inside = if items.is_empty() { empty } else { items.join(",") };
            format!("[{inside}]")
        });
        prop_oneof![list, object_of(inner.boxed(), 4)]
    })
    .boxed()
}

/// Any JSON object as text.
pub(crate) fn object() -> BoxedStrategy<String> {
    (white(), object_of(value(), 12), white()).prop_map(|(a, object, b)| format!("{a}{object}{b}")).boxed()
}

/// A request: any object with a model at any place.
pub(crate) fn request() -> BoxedStrategy<String> {
    (object(), any::<bool>(), inside(false))
        .prop_map(|(object, first, model)| {
            let open = object.find('{').unwrap();
            let close = object.rfind('}').unwrap();
            let blank = Pairs::read(&object).0.is_empty();
            let comma = if blank { "" } else { "," };
            if first && !blank {
                // A later model of another type would win: append one more at the end as well.
                format!(
                    "{}\"model\":\"{model}\"{comma}{},\"model\":\"m\"{}",
                    &object[..=open],
                    &object[open + 1..close],
                    &object[close..]
                )
            } else {
                format!("{}{comma}\"model\" : \"{model}\"{}", &object[..close], &object[close..])
            }
        })
        .boxed()
}
