//! Block ids: there is one for every few tokens of a prompt. The spelling that engines use is read in one
//! pass; whatever is spelled otherwise, or wrong, element by element.

use super::HandOffDefect;
use crate::json::elements;
use crate::protocol::params::BlockIds;

/// Most digits of a number that is read in one pass.
const LONGEST: usize = 19;

/// The ids in `list`, a JSON list.
///
/// # Errors
/// The first defect.
pub(in crate::protocol::handoff) fn block_ids(list: &str) -> Result<BlockIds, HandOffDefect> {
    plain(list.as_bytes()).map_or_else(|| spelled_otherwise(list), Ok)
}

/// Whole numbers or lists of them, none empty, with nothing but commas and a blank behind each in between.
fn plain(list: &[u8]) -> Option<BlockIds> {
    let (b'[', inside) = list.split_first()? else { return None };
    if inside.first() != Some(&b'[') {
        let (flat, rest) = numbers(inside)?;
        return rest.is_empty().then(|| BlockIds::flat(flat));
    }
    let (mut groups, mut text) = (Vec::with_capacity(1), inside);
    loop {
        let (b'[', inside) = text.split_first()? else { return None };
        let (group, rest) = numbers(inside)?;
        groups.push(group);
        match rest {
            b"]" => return Some(BlockIds::grouped(groups)),
            [b',', b' ', rest @ ..] | [b',', rest @ ..] => text = rest,
            _ => return None,
        }
    }
}

/// At least one number, up to the closing bracket; what follows it.
fn numbers(text: &[u8]) -> Option<(Vec<u64>, &[u8])> {
    let mut numbers = Vec::with_capacity(text.len() / 4);
    let (mut number, mut digits) = (0_u64, 0);
    let mut bytes = text.iter();
    while let Some(byte) = bytes.next() {
        match *byte {
            digit @ b'0'..=b'9' => {
                // So many fit in any case.
                if digits == LONGEST {
                    return None;
                }
                number = number * 10 + u64::from(digit - b'0');
                digits += 1;
            }
            end @ (b',' | b']') if digits > 0 => {
                numbers.push(number);
                if end == b']' {
                    return Some((numbers, bytes.as_slice()));
                }
                (number, digits) = (0, 0);
                if let [b' ', rest @ ..] = bytes.as_slice() {
                    bytes = rest.iter();
                }
            }
            _ => return None,
        }
    }
    None
}

fn spelled_otherwise(list: &str) -> Result<BlockIds, HandOffDefect> {
    let (mut flat, mut groups) = (Vec::new(), Vec::new());
    for element in elements(list).map_err(|_| HandOffDefect::NotJson)? {
        let element = &list[element];
        if !element.starts_with('[') {
            flat.push(id(element)?);
            continue;
        }
        let inside = elements(element).map_err(|_| HandOffDefect::NotJson)?;
        groups.push(inside.into_iter().map(|inner| id(&element[inner])).collect::<Result<Vec<_>, _>>()?);
    }
    match (flat.is_empty(), groups.is_empty()) {
        (true, true) => Err(HandOffDefect::NoBlocks),
        (true, false) => Ok(BlockIds::grouped(groups)),
        (false, true) => Ok(BlockIds::flat(flat)),
        (false, false) => Err(HandOffDefect::BlockIdsMixed),
    }
}

fn id(raw: &str) -> Result<u64, HandOffDefect> {
    raw.parse().map_err(|_| match raw.parse::<i64>() {
        Ok(_) => HandOffDefect::BlockIdNegative,
        Err(_) => HandOffDefect::BlockIdNotInteger,
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn both_shapes_are_read() {
        assert_eq!(plain(b"[1,22, 333]"), Some(BlockIds::flat(vec![1, 22, 333])));
        assert_eq!(plain(b"[[0],[4, 5]]"), Some(BlockIds::grouped(vec![vec![0], vec![4, 5]])));
        assert_eq!(plain(b"[9999999999999999999]"), Some(BlockIds::flat(vec![9_999_999_999_999_999_999])));
    }

    #[test]
    fn everything_else_is_left() {
        for other in [
            "[]", "[[]]", "[[1],[]]", "[1,[2]]", "[[1],2]", "[-1]", "[1.0]", "[ 1]", "[1 ]", "null", "1",
            "[1", "[[1]",
        ] {
            assert_eq!(plain(other.as_bytes()), None, "{other}");
        }
        assert_eq!(plain(b"[18446744073709551615]"), None);
    }
}
