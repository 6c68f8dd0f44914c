//! The form of NIXL's agent metadata: enough to name an agent and to refuse a damaged blob.
//!
//! A blob is a tag line, then fields: a tag, a length of eight little-endian bytes, a value and a
//! bar. NIXL must not see one that is not whole: it would keep half of it and refuse the agent's
//! right blob from then on.

use super::config::NixlVersion;

const TAG: &[u8] = b"nixlSerDes|";
const MAX_NAME: usize = 1 << 10;
/// Far above the blob of an agent with thousands of registrations.
const MAX_BLOB: usize = 16 << 20;
const VERSION_MARK: &str = "@nixl-";

/// The name of the agent whose blob this is; none for anything but a whole blob.
pub(super) fn agent_name(blob: &[u8]) -> Option<&str> {
    if blob.len() > MAX_BLOB {
        return None;
    }
    let (name, rest) = field(blob.strip_prefix(TAG)?, b"Agent")?;
    if name.len() > MAX_NAME || name.contains(&0) {
        return None;
    }
    skip_memory(skip_connections(rest)?)?;
    std::str::from_utf8(name).ok().filter(|name| !name.is_empty())
}

/// Steps over how each backend of the agent is reached.
fn skip_connections(bytes: &[u8]) -> Option<&[u8]> {
    let (count, mut rest) = number(bytes, b"Conns")?;
    for _ in 0..count {
        let (_backend, after) = field(rest, b"t")?;
        let (_connection, after) = field(after, b"c")?;
        rest = after;
    }
    Some(rest)
}

/// Steps over what the agent has registered with each backend.
fn skip_memory(bytes: &[u8]) -> Option<&[u8]> {
    let (section, rest) = field(bytes, b"")?;
    let (lists, mut rest) = number(rest, b"nixlSecElms")?;
    for _ in 0..lists {
        let (_backend, after) = field(rest, b"bknd")?;
        let (_form, after) = field(after, b"nixlDList")?;
        let (_kind, after) = field(after, b"t")?;
        let (ranges, mut after) = number(after, b"n")?;
        for _ in 0..ranges {
            let (range, next) = field(after, b"")?;
            // Address, length and device, then what a backend needs to reach it.
            if range.len() < 24 {
                return None;
            }
            after = next;
        }
        rest = after;
    }
    (section == b"MemSection").then_some(rest)
}

/// A field whose value is a number.
fn number<'a>(bytes: &'a [u8], tag: &[u8]) -> Option<(u64, &'a [u8])> {
    let (value, rest) = field(bytes, tag)?;
    Some((u64::from_le_bytes(value.try_into().ok()?), rest))
}

/// The value of the first field and what follows it, when the field has that tag.
fn field<'a>(bytes: &'a [u8], tag: &[u8]) -> Option<(&'a [u8], &'a [u8])> {
    let (len, rest) = bytes.strip_prefix(tag)?.split_first_chunk::<8>()?;
    let (value, rest) = rest.split_at_checked(usize::try_from(u64::from_le_bytes(*len)).ok()?)?;
    Some((value, rest.strip_prefix(b"|")?))
}

/// A name that says which NIXL its agent runs.
pub(super) fn name_with_version(name: &str, unique: u32, version: Option<NixlVersion>) -> String {
    let name: String = name.chars().filter(|c| *c != '\0').take(200).collect();
    match version {
        Some(version) => format!("{name}#{unique:08x}{VERSION_MARK}{version}"),
        None => format!("{name}#{unique:08x}"),
    }
}

/// The version in a name made by [`name_with_version`].
pub(super) fn version_in_name(name: &str) -> Option<NixlVersion> {
    NixlVersion::parse(name.rsplit_once(VERSION_MARK)?.1)
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    fn put(blob: &mut Vec<u8>, tag: &[u8], value: &[u8]) {
        blob.extend(tag);
        blob.extend((value.len() as u64).to_le_bytes());
        blob.extend(value);
        blob.push(b'|');
    }

    fn blob(name: &[u8], ranges: u64) -> Vec<u8> {
        let mut blob = b"nixlSerDes|".to_vec();
        put(&mut blob, b"Agent", name);
        put(&mut blob, b"Conns", &1_u64.to_le_bytes());
        put(&mut blob, b"t", b"UCX");
        put(&mut blob, b"c", &[0x7c; 40]);
        put(&mut blob, b"", b"MemSection");
        put(&mut blob, b"nixlSecElms", &1_u64.to_le_bytes());
        put(&mut blob, b"bknd", b"UCX");
        put(&mut blob, b"nixlDList", b"nixlSDList");
        put(&mut blob, b"t", &[0; 4]);
        put(&mut blob, b"n", &ranges.to_le_bytes());
        for _ in 0..ranges {
            put(&mut blob, b"", &[1; 35]);
        }
        blob
    }

    #[test]
    fn names_are_read_from_whole_blobs_only() {
        assert_eq!(agent_name(&blob(b"aaa", 2)), Some("aaa"));
        assert_eq!(agent_name(&blob("p-é".as_bytes(), 0)), Some("p-é"));
        for name in [&b""[..], b"a\0b", b"\xff", &[b'x'; 2000]] {
            assert_eq!(agent_name(&blob(name, 1)), None);
        }
        let whole = blob(b"aaa", 3);
        for len in 0..whole.len() {
            assert_eq!(agent_name(&whole[..len]), None, "{len} bytes");
        }
        let mut many = blob(b"aaa", 0);
        let count = many.len() - 9;
        many[count..count + 8].fill(0xff);
        assert_eq!(agent_name(&many), None);
    }

    #[test]
    fn names_carry_the_version() {
        let version = NixlVersion { major: 1, minor: 5, patch: 1 };
        let name = name_with_version("p", 0x1f, Some(version));
        assert_eq!(name, "p#0000001f@nixl-1.5.1");
        assert_eq!(version_in_name(&name), Some(version));
        assert_eq!(version_in_name(&name_with_version("p", 1, None)), None);
        assert_eq!(version_in_name("7f2e6e0c-9d5c-4b8b-8a51-0c1f53a3a3c2"), None);
        assert_eq!(version_in_name("p@nixl-1.5"), None);
    }

    proptest! {
        #[test]
        fn foreign_bytes_never_panic(bytes in proptest::collection::vec(any::<u8>(), 0..80)) {
            prop_assert_eq!(agent_name(&bytes), None);
            let _decided = agent_name(&[TAG, b"Agent", &bytes].concat());
        }
    }
}
