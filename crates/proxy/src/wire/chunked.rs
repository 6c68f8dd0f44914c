//! The chunked coding, taken apart as bytes come. Trailers are read over.

use bytes::BytesMut;

/// Most bytes of a chunk's extension or of all trailers.
const LONGEST_ASIDE: usize = 16 << 10;

/// The body breaks the coding.
#[derive(Debug, PartialEq, Eq)]
pub(super) struct Malformed;

/// Where in the coding a body is.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum At {
    /// A chunk's size, with the digits that have come.
    Size {
        digits: u8,
    },
    /// After the size, until the line's end.
    Extension,
    SizeEnd,
    Data,
    DataReturn,
    DataEnd,
    /// The beginning of a line after the last chunk.
    Trailer,
    InTrailer,
    LastEnd,
    Done,
}

/// A body in the chunked coding.
#[derive(Debug)]
pub(super) struct Chunked {
    at: At,
    /// What is left of the chunk.
    left: u64,
    aside: usize,
}

impl Chunked {
    pub(super) const fn new() -> Self {
        Self { at: At::Size { digits: 0 }, left: 0, aside: 0 }
    }

    pub(super) fn is_done(&self) -> bool {
        self.at == At::Done
    }

    /// Adds the data in `input` to `data`; how much of the input belonged to the body.
    pub(super) fn take(&mut self, input: &[u8], data: &mut BytesMut) -> Result<usize, Malformed> {
        let mut at = 0;
        while let Some(byte) = input.get(at).copied() {
            match self.at {
                At::Done => break,
                At::Data => {
                    let rest = &input[at..];
                    let most = usize::try_from(self.left).unwrap_or(usize::MAX).min(rest.len());
                    data.extend_from_slice(&rest[..most]);
                    self.left -= most as u64;
                    at += most;
                    if self.left == 0 {
                        self.at = At::DataReturn;
                    }
                    continue;
                }
                _ => self.step(byte)?,
            }
            at += 1;
        }
        Ok(at)
    }

    fn step(&mut self, byte: u8) -> Result<(), Malformed> {
        self.at = match (self.at, byte) {
            (At::Size { digits }, b'0'..=b'9' | b'a'..=b'f' | b'A'..=b'F') if digits < 16 => {
                let digit = char::from(byte).to_digit(16).unwrap_or_default();
                self.left = self.left << 4 | u64::from(digit);
                At::Size { digits: digits + 1 }
            }
            (At::Size { digits: 1.. }, b'\r') | (At::Extension, b'\r') => At::SizeEnd,
            (At::Size { digits: 1.. }, b';' | b' ' | b'\t') => At::Extension,
            (At::Extension, byte) if byte != b'\n' => {
                self.count_aside()?;
                At::Extension
            }
            (At::SizeEnd, b'\n') if self.left == 0 => At::Trailer,
            (At::SizeEnd, b'\n') => {
                self.aside = 0;
                At::Data
            }
            (At::DataReturn, b'\r') => At::DataEnd,
            (At::DataEnd, b'\n') => At::Size { digits: 0 },
            (At::Trailer, b'\r') => At::LastEnd,
            (At::InTrailer, b'\n') => At::Trailer,
            (At::Trailer | At::InTrailer, _) => {
                self.count_aside()?;
                At::InTrailer
            }
            (At::LastEnd, b'\n') => At::Done,
            _ => return Err(Malformed),
        };
        Ok(())
    }

    fn count_aside(&mut self) -> Result<(), Malformed> {
        self.aside += 1;
        if self.aside > LONGEST_ASIDE { Err(Malformed) } else { Ok(()) }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn whole(input: &[u8], piece: usize) -> Result<(String, usize, bool), Malformed> {
        let (mut chunked, mut data, mut used) = (Chunked::new(), BytesMut::new(), 0);
        for piece in input.chunks(piece) {
            used += chunked.take(piece, &mut data)?;
        }
        Ok((String::from_utf8_lossy(&data).into_owned(), used, chunked.is_done()))
    }

    #[test]
    fn chunks_are_joined_however_they_come() {
        let body = b"5\r\nhello\r\n6;a=b\r\n world\r\n0\r\nx: y\r\n\r\n";
        for piece in 1..=body.len() {
            assert_eq!(whole(body, piece), Ok(("hello world".to_owned(), body.len(), true)), "{piece}");
        }
    }

    #[test]
    fn what_follows_the_end_is_left() {
        assert_eq!(whole(b"1\r\na\r\n0\r\n\r\nHTTP/1.1", 100), Ok(("a".to_owned(), 11, true)));
    }

    #[test]
    fn the_size_of_a_chunk_is_hexadecimal_and_bounded() {
        assert_eq!(whole(b"A\r\n0123456789\r\n0\r\n\r\n", 3), Ok(("0123456789".to_owned(), 20, true)));
        for bad in [&b"\r\n"[..], b"g\r\n", b"1\na\r\n", b"1\r\nab\r\n", b"11111111111111111\r\n", b"-1\r\n"]
        {
            assert_eq!(whole(bad, 100), Err(Malformed), "{:?}", String::from_utf8_lossy(bad));
        }
    }

    #[test]
    fn asides_are_bounded() {
        let long = [b"1;".as_slice(), &vec![b'x'; LONGEST_ASIDE + 1], b"\r\na\r\n"].concat();
        assert_eq!(whole(&long, 100), Err(Malformed));
    }
}
