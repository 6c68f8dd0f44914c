//! Block ids: there is one for every few tokens of a prompt. The spelling that engines use is read in one
//! pass; whatever is spelled otherwise, or wrong, element by element.

use super::HandOffDefect;
use crate::json::elements;
use crate::protocol::params::BlockIds;

/// Most digits of a number that is read in one pass.
const LONGEST: usize = 19;

/// For how many ids there is room before the first is read.
const LIKELY: usize = 64;

/// The list that `text` begins with, if there is nothing in it but whole numbers, or lists of them, none empty, with
/// commas and at most a blank behind each in between; what follows it.
pub(super) fn plain(text: &[u8]) -> Option<(BlockIds, &[u8])> {
    let (b'[', inside) = text.split_first()? else { return None };
    if inside.first() != Some(&b'[') {
        let (flat, rest) = numbers(inside)?;
        return Some((BlockIds::flat(flat), rest));
    }
    let (mut groups, mut text) = (Vec::with_capacity(1), inside);
    loop {
        let (b'[', inside) = text.split_first()? else { return None };
        let (group, rest) = numbers(inside)?;
        groups.push(group);
        match rest {
            [b']', rest @ ..] => return Some((BlockIds::grouped(groups), rest)),
            [b',', b' ', rest @ ..] | [b',', rest @ ..] => text = rest,
            _ => return None,
        }
    }
}

/// At least one number, up to the closing bracket; what follows it.
fn numbers(text: &[u8]) -> Option<(Vec<u64>, &[u8])> {
    let mut numbers = Vec::with_capacity(LIKELY);
    let mut at = 0;
    loop {
        let start = at;
        let mut number = 0_u64;
        while let Some(digit @ b'0'..=b'9') = text.get(at) {
            number = number.wrapping_mul(10).wrapping_add(u64::from(digit - b'0'));
            at += 1;
        }
        let digits = at - start;
        // So many fit in any case; and a number that begins with a nought is none.
        if digits == 0 || digits > LONGEST || (digits > 1 && text[start] == b'0') {
            return None;
        }
        numbers.push(number);
        match text.get(at..)? {
            [b']', rest @ ..] => return Some((numbers, rest)),
            [b',', b' ', ..] => at += 2,
            [b',', ..] => at += 1,
            _ => return None,
        }
    }
}

/// The ids in `list`, a JSON list that is not [`plain`].
///
/// # Errors
/// The first defect.
pub(in crate::protocol::handoff) fn block_ids(list: &str) -> Result<BlockIds, HandOffDefect> {
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

    fn whole(text: &str) -> Option<BlockIds> {
        plain(text.as_bytes()).filter(|(_, rest)| rest.is_empty()).map(|(ids, _)| ids)
    }

    #[test]
    fn both_shapes_are_read() {
        assert_eq!(whole("[1,22, 333]"), Some(BlockIds::flat(vec![1, 22, 333])));
        assert_eq!(whole("[[0],[4, 5]]"), Some(BlockIds::grouped(vec![vec![0], vec![4, 5]])));
        assert_eq!(whole("[9999999999999999999]"), Some(BlockIds::flat(vec![9_999_999_999_999_999_999])));
        assert_eq!(plain(b"[[7]],\"x\""), Some((BlockIds::grouped(vec![vec![7]]), &b",\"x\""[..])));
    }

    #[test]
    fn everything_else_is_left() {
        for other in [
            "[]",
            "[[]]",
            "[[1],[]]",
            "[1,[2]]",
            "[[1],2]",
            "[-1]",
            "[1.0]",
            "[ 1]",
            "[1 ]",
            "null",
            "1",
            "[1",
            "[[1]",
            "[01]",
            "[1,]",
            "[1,  2]",
            "[1]]",
            "[[1],]",
            "[18446744073709551615]",
        ] {
            assert_eq!(whole(other), None, "{other}");
        }
    }
}
