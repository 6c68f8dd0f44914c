//! One spelling per base URL, so that two engines at one address are seen to be.

use url::Url;

/// The one spelling of a base URL: lower case scheme and host, no default port, no slash at the
/// end. `None` when it is no base URL. Names are not resolved: `localhost` is not `127.0.0.1`.
#[must_use]
pub fn canonical_base_url(text: &str) -> Option<String> {
    let url = Url::parse(text).ok()?;
    let usable = matches!(url.scheme(), "http" | "https")
        && url.host_str().is_some_and(|host| !host.is_empty())
        && url.username().is_empty()
        && url.password().is_none()
        && url.query().is_none()
        && url.fragment().is_none();
    usable.then(|| url.as_str().trim_end_matches('/').to_owned())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn spellings_of_one_address_are_one() {
        for text in ["http://host:8000", "HTTP://Host:8000/", " http://host:8000// "] {
            assert_eq!(canonical_base_url(text).as_deref(), Some("http://host:8000"), "{text}");
        }
        assert_eq!(canonical_base_url("http://host:80/").as_deref(), Some("http://host"));
        assert_eq!(canonical_base_url("https://host:443/a/").as_deref(), Some("https://host/a"));
        assert_eq!(canonical_base_url("http://[::1]:1").as_deref(), Some("http://[::1]:1"));
    }

    #[test]
    fn what_is_no_base_url_has_none() {
        for text in
            ["", "host:8000", "tcp://host:1", "http://", "http://a:b@host", "http://host/?x", "http://h/#f"]
        {
            assert_eq!(canonical_base_url(text), None, "{text}");
        }
    }
}
