//! Which of an answer's two forms is wanted, and whether the asker has it already.

use http::header::{ACCEPT, CONTENT_TYPE, HeaderMap, IF_NONE_MATCH};

/// The media type of payloads.
pub(super) const MSGPACK: &str = "application/msgpack";
/// The media type of what people read.
pub(super) const JSON: &str = "application/json";

/// Whether JSON is asked for before the payload itself, which is what engines want.
pub(super) fn prefers_json(headers: &HeaderMap) -> bool {
    weight(headers, JSON) > weight(headers, MSGPACK)
}

/// Whether msgpack is asked for by its name.
pub(super) fn asks_for_msgpack(headers: &HeaderMap) -> bool {
    weight(headers, MSGPACK).1 == 3
}

/// The media type of a body, without its parameters.
pub(super) fn body_type(headers: &HeaderMap) -> Option<&str> {
    let value = headers.get(CONTENT_TYPE)?.to_str().ok()?;
    Some(value.split(';').next().unwrap_or(value).trim())
}

/// Whether the asker names this tag as the one that it has.
pub(super) fn has_tag(headers: &HeaderMap, tag: &str) -> bool {
    let lines = headers.get_all(IF_NONE_MATCH).iter().filter_map(|value| value.to_str().ok());
    lines.flat_map(|line| line.split(',')).map(str::trim).any(|known| {
        // The comparison that RFC 9110 asks for here takes a weak tag for a strong one.
        known == "*" || known.strip_prefix("W/").unwrap_or(known) == tag
    })
}

/// How much a media type is wanted: quality in thousandths, then how exactly it is named.
fn weight(headers: &HeaderMap, media_type: &str) -> (u16, u8) {
    let mut found = (0, 0);
    let lines = headers.get_all(ACCEPT).iter().filter_map(|value| value.to_str().ok());
    for range in lines.flat_map(|line| line.split(',')) {
        let mut parts = range.split(';').map(str::trim);
        let exactness = match parts.next().unwrap_or_default() {
            exact if exact.eq_ignore_ascii_case(media_type) => 3,
            "application/*" => 2,
            "*/*" => 1,
            _ => continue,
        };
        let quality = parts
            .find_map(|parameter| parameter.strip_prefix("q=").or_else(|| parameter.strip_prefix("Q=")))
            .map_or(Some(1.0_f32), |text| text.parse().ok())
            .filter(|quality| (0.0..=1.0).contains(quality))
            .unwrap_or(0.0);
        if exactness > found.1 {
            found = ((quality * 1000.0) as u16, exactness);
        }
    }
    if found.0 == 0 { (0, 0) } else { found }
}

#[cfg(test)]
mod tests {
    use http::header::HeaderValue;

    use super::*;

    fn prefers(accept: &'static str) -> bool {
        prefers_json(&HeaderMap::from_iter([(ACCEPT, HeaderValue::from_static(accept))]))
    }

    #[test]
    fn json_goes_to_those_who_ask_for_it() {
        assert!(prefers("application/json"));
        assert!(prefers("Application/JSON; charset=utf-8"));
        assert!(prefers("application/json, text/plain, */*"));
        assert!(prefers("application/msgpack;q=0.5, application/json"));
    }

    #[test]
    fn engines_and_the_indifferent_get_the_payload() {
        assert!(!prefers_json(&HeaderMap::new()));
        assert!(!prefers("*/*"));
        assert!(!prefers("text/html"));
        assert!(!prefers("application/msgpack"));
        assert!(!prefers("application/json;q=0"));
        assert!(!prefers("application/json, application/msgpack"));
        assert!(!prefers("application/json;q=0.3, application/*"));
    }

    #[test]
    fn a_tag_is_known_in_any_of_its_spellings() {
        let has = |value: &'static str| {
            has_tag(&HeaderMap::from_iter([(IF_NONE_MATCH, HeaderValue::from_static(value))]), "\"a\"")
        };
        assert!(has("\"a\""));
        assert!(has("\"b\", W/\"a\""));
        assert!(has("*"));
        assert!(!has("\"b\""));
        assert!(!has("a"));
        assert!(!has_tag(&HeaderMap::new(), "\"a\""));
    }
}
