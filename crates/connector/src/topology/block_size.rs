//! Logical and kernel block sizes: what the scheduler allocates and what the kernels use.

/// Block sizes that an attention backend accepts.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum KernelSizes {
    /// This size only.
    Exact(u64),
    /// Every multiple of this size.
    MultipleOf(u64),
}

impl KernelSizes {
    fn accepts(self, size: u64) -> bool {
        match self {
            Self::Exact(exact) => exact == size,
            Self::MultipleOf(base) => base != 0 && size.is_multiple_of(base),
        }
    }
}

/// The kernel block size for a logical one, given what each backend accepts.
///
/// The logical size itself where all accept it, else the largest exact size that divides it and
/// that all accept; none when there is no such size.
pub fn kernel_block_size(logical: u64, backends: &[&[KernelSizes]]) -> Option<u64> {
    let supported =
        |size: u64| backends.iter().all(|accepted| accepted.iter().any(|sizes| sizes.accepts(size)));
    if supported(logical) {
        return Some(logical);
    }
    let exact = backends.iter().flat_map(|accepted| accepted.iter()).filter_map(|sizes| match sizes {
        KernelSizes::Exact(size) if *size != 0 && logical.is_multiple_of(*size) => Some(*size),
        _ => None,
    });
    exact.filter(|size| supported(*size)).max()
}

/// The logical block size of a worker: the least common multiple over its attention groups.
///
/// None without such groups or when the multiple does not fit.
pub fn logical_block_size(group_sizes: &[u64]) -> Option<u64> {
    let (first, rest) = group_sizes.split_first()?;
    rest.iter().try_fold(*first, |multiple, size| {
        let divisor = greatest_common_divisor(multiple, *size);
        multiple.checked_div(divisor)?.checked_mul(*size)
    })
}

fn greatest_common_divisor(mut a: u64, mut b: u64) -> u64 {
    while b != 0 {
        (a, b) = (b, a % b);
    }
    a
}
