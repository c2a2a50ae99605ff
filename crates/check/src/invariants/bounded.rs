//! **bounded**: no queue, table or chain exceeds its stated size; beyond it there is a reject.

use super::{Violation, violated};

/// The size of something at some moment.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Size {
    /// What it is, for people: "versions of key k at replica 1".
    pub what: String,
    /// How much there was.
    pub size: u64,
    /// How much there may be.
    pub max: u64,
}

/// Checks all sizes observed.
pub fn check<'a>(sizes: impl IntoIterator<Item = &'a Size>) -> Result<(), Violation> {
    match sizes.into_iter().find(|size| size.size > size.max) {
        None => Ok(()),
        Some(Size { what, size, max }) => violated("bounded", format!("{what}: {size}, but at most {max} are stated")),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn up_to_its_bound_and_no_further() {
        let mut size = Size { what: "versions of key k at replica 1".into(), size: 4096, max: 4096 };
        check([&size]).unwrap();
        size.size += 1;
        assert!(check([&size]).unwrap_err().what.contains("replica 1: 4097, but at most 4096"));
    }
}
