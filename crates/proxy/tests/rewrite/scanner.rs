//! The scanner accepts what serde_json accepts, and finds the same members at the same places.

use kvbaton_proxy::json::{JsonFault, JsonFaultKind, Member, members, unescape};
use proptest::prelude::*;
use serde_json::value::RawValue;

use crate::oracle::{Pairs, object};

fn scan(bytes: &[u8]) -> Result<Vec<Member<'_>>, JsonFault> {
    members(bytes)?.collect()
}

/// serde_json's verdict, narrowed to objects: other top-level values are this scanner's own refusal.
fn oracle_accepts(bytes: &[u8]) -> bool {
    let object = bytes.iter().find(|byte| !b" \n\t\r".contains(byte)) == Some(&b'{');
    object && serde_json::from_slice::<&RawValue>(bytes).is_ok()
}

/// What goes wrong in JSON: a byte changed, left out, put in or repeated.
fn mutate(text: &str, changes: &[(prop::sample::Index, u8, u8)]) -> Vec<u8> {
    const ALPHABET: &[u8] = b"{}[]\",:\\u0d8tfn-+.eE 19\n\x1f\x00/a\xc3\xa9\xff";
    let mut bytes = text.as_bytes().to_vec();
    for (index, action, pick) in changes {
        let at = index.index(bytes.len().max(1));
        let byte = ALPHABET[usize::from(*pick) % ALPHABET.len()];
        match action % 4 {
            0 if at < bytes.len() => bytes[at] = byte,
            1 if at < bytes.len() => drop(bytes.remove(at)),
            2 => bytes.truncate(at),
            _ => bytes.insert(at.min(bytes.len()), byte),
        }
    }
    bytes
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 512, ..ProptestConfig::default() })]

    #[test]
    fn members_are_those_that_serde_finds(given in object()) {
        let found = scan(given.as_bytes()).unwrap();
        let pairs: Vec<_> = found
            .iter()
            .map(|member| (unescape(member.raw_key()).into_owned(), member.raw_value().to_owned()))
            .collect();
        prop_assert_eq!(&pairs, &Pairs::read(&given).0);
        for (member, (key, value)) in found.iter().zip(&pairs) {
            prop_assert!(member.key_is(key));
            prop_assert_eq!(&given[member.value()], value);
            prop_assert!(given[member.span()].starts_with('"') && given[member.span()].ends_with(value.as_str()));
        }
    }

    #[test]
    fn verdicts_agree_on_mutated_objects(
        given in object(), changes in prop::collection::vec(any::<(prop::sample::Index, u8, u8)>(), 1..4),
    ) {
        let bytes = mutate(&given, &changes);
        let verdict = scan(&bytes);
        prop_assert_eq!(verdict.is_ok(), oracle_accepts(&bytes), "{:?}", String::from_utf8_lossy(&bytes));
        if let Err(fault) = verdict {
            prop_assert!(fault.offset <= bytes.len());
            prop_assert_eq!(fault.kind == JsonFaultKind::Utf8, std::str::from_utf8(&bytes).is_err());
        }
    }

    #[test]
    fn verdicts_agree_on_arbitrary_bytes(bytes: Vec<u8>) {
        prop_assert_eq!(scan(&bytes).is_ok(), oracle_accepts(&bytes));
    }

    #[test]
    fn verdicts_agree_on_json_like_noise(noise in "[{}\\[\\]\",:\\\\untrfals0-9eE+. -]{0,24}") {
        let wrapped = format!("{{\"a\":{noise}}}");
        prop_assert_eq!(scan(wrapped.as_bytes()).is_ok(), oracle_accepts(wrapped.as_bytes()), "{}", wrapped);
    }
}

#[test]
fn the_iterator_ends_after_a_fault() {
    let mut walk = members(br#"{"a":1,"b":x,"c":2}"#).unwrap();
    assert!(walk.next().unwrap().unwrap().key_is("a"));
    assert_eq!(
        walk.next().unwrap().unwrap_err(),
        JsonFault { offset: 11, kind: JsonFaultKind::UnexpectedByte }
    );
    assert!(walk.next().is_none());
}

#[test]
fn every_truncation_is_an_unexpected_end() {
    let whole = r#"{"a":[1,-2.5e+3,{"b":"c\u00e9\n"}],"d":true,"e":null}"#;
    for end in 0..whole.len() {
        let fault = scan(&whole.as_bytes()[..end]).unwrap_err();
        assert_eq!(fault.kind, JsonFaultKind::UnexpectedEnd, "{}", &whole[..end]);
        assert_eq!(fault.offset, end);
    }
}
