//! The client's trace context, read as W3C's Trace Context says: what is not whole is as if it were not there.

use http::HeaderMap;

use super::TRACEPARENT;

/// What a usable `traceparent` says.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Parent {
    pub(crate) trace_id: u128,
    pub(crate) span_id: u64,
    pub(crate) sampled: bool,
}

impl Parent {
    /// The one in a request's headers, if there is exactly one.
    pub(crate) fn of(headers: &HeaderMap) -> Option<Self> {
        let mut values = headers.get_all(TRACEPARENT).iter();
        let value = values.next()?;
        if values.next().is_some() {
            return None;
        }
        Self::read(value.as_bytes())
    }

    fn read(value: &[u8]) -> Option<Self> {
        let (known, rest) = value.split_at_checked(55)?;
        let version = hex(&known[..2])? as u8;
        let dashes = [2, 35, 52].iter().all(|at| known[*at] == b'-');
        // A later version may say more after what is known.
        let ends = rest.is_empty() || version > 0 && rest[0] == b'-';
        if version == 0xff || !dashes || !ends {
            return None;
        }
        let (trace_id, span_id) = (hex(&known[3..35])?, hex(&known[36..52])? as u64);
        let flags = hex(&known[53..55])?;
        (trace_id != 0 && span_id != 0).then_some(Self { trace_id, span_id, sampled: flags & 1 == 1 })
    }
}

/// Lower-case digits only.
fn hex(digits: &[u8]) -> Option<u128> {
    digits.iter().try_fold(0, |number, digit| {
        let value = match digit {
            b'0'..=b'9' => digit - b'0',
            b'a'..=b'f' => digit - b'a' + 10,
            _ => return None,
        };
        Some(number << 4 | u128::from(value))
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_a_whole_context_is_one() {
        let good = "00-4bf92f3577b34da6a3ce929d0e0e4736-00f067aa0ba902b7-01";
        let parent = Parent::read(good.as_bytes()).unwrap();
        assert_eq!(parent.trace_id, 0x4bf9_2f35_77b3_4da6_a3ce_929d_0e0e_4736);
        assert_eq!((parent.span_id, parent.sampled), (0x00f0_67aa_0ba9_02b7, true));
        assert!(!Parent::read(good.replace("-01", "-02").as_bytes()).unwrap().sampled);
        assert!(Parent::read(good.replace("00-4b", "01-4b").as_bytes()).is_some(), "a later version");
        assert!(Parent::read(format!("{}-more", good.replace("00-4b", "cc-4b")).as_bytes()).is_some());
        for bad in [
            String::new(),
            good[..54].to_owned(),
            format!("{good}-more"),
            good.replace("00-4b", "ff-4b"),
            good.replace("4bf92f3577b34da6a3ce929d0e0e4736", &"0".repeat(32)),
            good.replace("00f067aa0ba902b7", &"0".repeat(16)),
            good.to_uppercase(),
            good.replace("-01", "-0x"),
            good.replace("-00f0", "_00f0"),
        ] {
            assert_eq!(Parent::read(bad.as_bytes()), None, "{bad}");
        }
    }

    #[test]
    fn two_contexts_are_none() {
        let mut headers = HeaderMap::new();
        let value = "00-4bf92f3577b34da6a3ce929d0e0e4736-00f067aa0ba902b7-01";
        headers.append(TRACEPARENT, value.parse().unwrap());
        assert!(Parent::of(&headers).is_some());
        headers.append(TRACEPARENT, value.parse().unwrap());
        assert_eq!(Parent::of(&headers), None);
    }
}
