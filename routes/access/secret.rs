//! Tokens and keys as digests: what is kept tells nobody the secret, and comparing digests tells
//! nothing by its time.

use std::fmt;

use sha2::{Digest, Sha256};
use subtle::{Choice, ConstantTimeEq};

/// The SHA-256 digest of a token or key.
#[derive(Clone, Copy, PartialEq, Eq)]
pub struct SecretDigest([u8; 32]);

/// A text that cannot serve as a secret or as the digest of one.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
pub enum SecretError {
    /// It is empty, so everybody would hold it.
    #[error("the token is empty")]
    Empty,
    /// It holds a space, a control character or a character outside ASCII.
    #[error("the token holds a character other than visible ASCII")]
    NotVisibleAscii,
    /// It is no digest.
    #[error("is not a SHA-256 digest in hex, 64 digits with or without \"sha256:\"")]
    NotADigest,
}

impl SecretDigest {
    /// The digest of a secret that an HTTP header can carry.
    ///
    /// # Errors
    /// When it is empty or holds anything but visible ASCII.
    pub fn of(secret: &str) -> Result<Self, SecretError> {
        if secret.is_empty() {
            return Err(SecretError::Empty);
        }
        if !secret.bytes().all(|byte| byte.is_ascii_graphic()) {
            return Err(SecretError::NotVisibleAscii);
        }
        Ok(Self::of_presented(secret.as_bytes()))
    }

    /// A digest as the settings write it.
    ///
    /// # Errors
    /// When it is none.
    pub fn from_hex(text: &str) -> Result<Self, SecretError> {
        let digits = text.strip_prefix("sha256:").unwrap_or(text).as_bytes();
        let mut digest = [0; 32];
        if digits.len() != 2 * digest.len() {
            return Err(SecretError::NotADigest);
        }
        for (byte, pair) in digest.iter_mut().zip(digits.chunks_exact(2)) {
            let value = |digit: u8| char::from(digit).to_digit(16).ok_or(SecretError::NotADigest);
            *byte =
                u8::try_from(value(pair[0])? << 4 | value(pair[1])?).map_err(|_| SecretError::NotADigest)?;
        }
        Ok(Self(digest))
    }

    /// As the settings write it.
    #[must_use]
    pub fn to_hex(&self) -> String {
        self.0.iter().map(|byte| format!("{byte:02x}")).collect()
    }

    /// The digest of whatever a request presents.
    pub(super) fn of_presented(secret: &[u8]) -> Self {
        Self(Sha256::digest(secret).into())
    }

    /// Compares without an early end.
    pub(super) fn matches(&self, presented: &Self) -> Choice {
        self.0.ct_eq(&presented.0)
    }
}

impl fmt::Debug for SecretDigest {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("SecretDigest(..)")
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_secret_must_fit_a_header() {
        assert_eq!(SecretDigest::of(""), Err(SecretError::Empty));
        assert_eq!(SecretDigest::of("two words"), Err(SecretError::NotVisibleAscii));
        assert_eq!(SecretDigest::of("schlüssel"), Err(SecretError::NotVisibleAscii));
        assert!(SecretDigest::of("s3cret-~!").is_ok());
    }

    #[test]
    fn a_secret_is_compared_whole_and_never_printed() {
        let kept = SecretDigest::of("s3cret").unwrap();
        let matches = |presented: &[u8]| bool::from(kept.matches(&SecretDigest::of_presented(presented)));
        assert!(matches(b"s3cret"));
        for other in [&b"s3creT"[..], b"s3cre", b"s3cret2", b"", b"\xff"] {
            assert!(!matches(other));
        }
        assert_eq!(format!("{kept:?}"), "SecretDigest(..)");
    }

    #[test]
    fn the_hex_form_is_that_of_common_tools() {
        let hex = "ba7816bf8f01cfea414140de5dae2223b00361a396177a9cb410ff61f20015ad";
        let digest = SecretDigest::of("abc").unwrap();
        assert_eq!(digest.to_hex(), hex);
        assert_eq!(SecretDigest::from_hex(hex), Ok(digest));
        assert_eq!(SecretDigest::from_hex(&format!("sha256:{}", hex.to_uppercase())), Ok(digest));
        for wrong in ["", "abc", &hex[1..], &format!("{hex}0"), &hex.replace('b', "g"), &"é".repeat(32)] {
            assert_eq!(SecretDigest::from_hex(wrong), Err(SecretError::NotADigest), "{wrong}");
        }
    }
}
