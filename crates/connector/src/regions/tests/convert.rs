use proptest::prelude::*;

use super::super::convert::{
    BlockShape, Coverage, ShapeMismatch, coverage, regroup_and_permute, regroup_heads, tail_ranges,
};
use super::*;

#[test]
fn conversions_equal_vllm() {
    let vectors = vectors("topology_v032.json");
    let cases = list(&vectors["postprocess"]);
    assert_eq!(cases.len(), 3);
    for case in cases {
        let size = |key: &str| usize::try_from(case[key].as_u64().unwrap()).unwrap();
        let (heads, tokens, dim, ratio) = (size("heads"), size("block_tokens"), size("dim"), size("ratio"));
        let shape = BlockShape { heads, tokens, content_bytes: dim };
        let bytes = shape.bytes().unwrap();
        let memory: Vec<u8> = (0..2 * bytes).map(|i| u8::try_from(i).unwrap()).collect();
        let expected = |key: &str| -> Vec<u8> {
            numbers(&case[key]).into_iter().map(|value| u8::try_from(value).unwrap()).collect()
        };
        let mut regrouped = memory.clone();
        regroup_heads(&mut regrouped[bytes..], shape, ratio).unwrap();
        assert_eq!(regrouped, expected("blksize_HND"), "{case}");
        let mut permuted = memory;
        regroup_and_permute(&mut permuted[bytes..], shape, ratio).unwrap();
        assert_eq!(permuted, expected("blksize_and_layout_HND_to_NHD"), "{case}");
    }
}

#[test]
fn what_a_receive_leaves_open_is_known() {
    // Three blocks of four pieces, ten remote blocks.
    assert_eq!(coverage(3, 10, 4), Coverage { full_blocks: 2, pieces_in_last: 2, first_stale: 3 });
    assert_eq!(coverage(3, 5, 4), Coverage { full_blocks: 1, pieces_in_last: 1, first_stale: 2 });
    assert_eq!(coverage(2, 10, 1), Coverage { full_blocks: 2, pieces_in_last: 0, first_stale: 2 });
    assert_eq!(coverage(12, 10, 1), Coverage { full_blocks: 10, pieces_in_last: 0, first_stale: 10 });
    let shape = BlockShape { heads: 2, tokens: 4, content_bytes: 8 };
    assert_eq!(tail_ranges(shape, true, 3), [24..32, 56..64]);
    assert_eq!(tail_ranges(shape, false, 3), std::iter::once(48..64).collect::<Vec<_>>());
    assert_eq!(tail_ranges(shape, true, 4), []);
}

#[test]
fn blocks_of_another_shape_are_refused() {
    let shape = BlockShape { heads: 2, tokens: 4, content_bytes: 1 };
    let mut block = [0; 7];
    assert_eq!(regroup_heads(&mut block, shape, 2), Err(ShapeMismatch { got: 7 }));
    let mut block = [0; 8];
    assert_eq!(regroup_heads(&mut block, shape, 3), Err(ShapeMismatch { got: 8 }));
    assert_eq!(regroup_and_permute(&mut block, shape, 0), Err(ShapeMismatch { got: 8 }));
    let huge = BlockShape { heads: usize::MAX, tokens: 2, content_bytes: 1 };
    assert_eq!(regroup_heads(&mut block, huge, 1), Err(ShapeMismatch { got: 8 }));
}

proptest! {
    #[test]
    fn every_byte_ends_where_its_head_and_token_belong(heads in 1_usize..5, pieces in 1_usize..5, piece_tokens in 1_usize..5, content in 1_usize..4) {
        let tokens = pieces * piece_tokens;
        let shape = BlockShape { heads, tokens, content_bytes: content };
        let value = |head: usize, token: usize, byte: usize| ((head * 31 + token * 7 + byte) % 251) as u8;
        let mut received = Vec::new();
        for piece in 0..pieces {
            for head in 0..heads {
                for token in 0..piece_tokens {
                    received.extend((0..content).map(|byte| value(head, piece * piece_tokens + token, byte)));
                }
            }
        }
        let mut head_major = received.clone();
        regroup_heads(&mut head_major, shape, pieces).unwrap();
        let mut token_major = received;
        regroup_and_permute(&mut token_major, shape, pieces).unwrap();
        for head in 0..heads {
            for token in 0..tokens {
                for byte in 0..content {
                    let expected = value(head, token, byte);
                    prop_assert_eq!(head_major[(head * tokens + token) * content + byte], expected);
                    prop_assert_eq!(token_major[(token * heads + head) * content + byte], expected);
                }
            }
        }
    }

    #[test]
    fn tails_are_the_bytes_of_later_tokens(heads in 1_usize..4, tokens in 1_usize..6, content in 1_usize..4, kept in 0_usize..8, head_major in any::<bool>()) {
        let shape = BlockShape { heads, tokens, content_bytes: content };
        let mut open = vec![false; shape.bytes().unwrap()];
        for range in tail_ranges(shape, head_major, kept) {
            open[range].fill(true);
        }
        for head in 0..heads {
            for token in 0..tokens {
                let at = if head_major { head * tokens + token } else { token * heads + head };
                prop_assert_eq!(open[at * content], token >= kept);
            }
        }
    }
}
