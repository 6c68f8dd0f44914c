//! Block ids in the spelling that engines use, read without a visit for each: there is one for every few
//! tokens of a prompt. Whatever is spelled otherwise, or wrong, is left to the slow way.

use crate::protocol::params::BlockIds;

/// Most digits of a number that is read here.
const LONGEST: usize = 19;

/// The ids in `list`, one JSON value, if it is a list of whole numbers or a list of such lists, none empty.
pub(super) fn block_ids(list: &str) -> Option<BlockIds> {
    let mut text = Text(list.as_bytes());
    text.take(b'[')?;
    if text.0.first() != Some(&b'[') {
        let flat = text.numbers()?;
        return text.0.is_empty().then(|| BlockIds::flat(flat));
    }
    let mut groups = Vec::with_capacity(1);
    loop {
        text.take(b'[')?;
        groups.push(text.numbers()?);
        if text.take(b']').is_some() {
            return text.0.is_empty().then(|| BlockIds::grouped(groups));
        }
        text.comma()?;
    }
}

struct Text<'a>(&'a [u8]);

impl Text<'_> {
    fn take(&mut self, byte: u8) -> Option<()> {
        let (first, rest) = self.0.split_first()?;
        (*first == byte).then(|| self.0 = rest)
    }

    fn comma(&mut self) -> Option<()> {
        self.take(b',')?;
        let _ = self.take(b' ');
        Some(())
    }

    /// At least one number, up to and with the closing bracket.
    fn numbers(&mut self) -> Option<Vec<u64>> {
        let mut numbers = Vec::with_capacity(self.0.len() / 4);
        loop {
            numbers.push(self.number()?);
            if self.take(b']').is_some() {
                return Some(numbers);
            }
            self.comma()?;
        }
    }

    fn number(&mut self) -> Option<u64> {
        let (mut number, mut digits) = (0_u64, 0);
        while let Some(digit @ b'0'..=b'9') = self.0.get(digits) {
            // So many fit in any case.
            if digits == LONGEST {
                return None;
            }
            number = number * 10 + u64::from(digit - b'0');
            digits += 1;
        }
        self.0 = &self.0[digits..];
        (digits > 0).then_some(number)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn both_shapes_are_read() {
        assert_eq!(block_ids("[1,22, 333]"), Some(BlockIds::flat(vec![1, 22, 333])));
        assert_eq!(block_ids("[[0],[4, 5]]"), Some(BlockIds::grouped(vec![vec![0], vec![4, 5]])));
        assert_eq!(block_ids("[9999999999999999999]"), Some(BlockIds::flat(vec![9_999_999_999_999_999_999])));
    }

    #[test]
    fn everything_else_is_left() {
        for other in [
            "[]", "[[]]", "[[1],[]]", "[1,[2]]", "[[1],2]", "[-1]", "[1.0]", "[ 1]", "[1 ]", "null", "1",
            "[1", "[[1]",
        ] {
            assert_eq!(block_ids(other), None, "{other}");
        }
        assert_eq!(block_ids("[18446744073709551615]"), None);
    }
}
