//! Reduction of each rank's value to one value of all ranks.

use std::ops::AddAssign;

use serde::{Serialize, de::DeserializeOwned};

/// A value that [`Exchange::reduce`](super::Exchange::reduce) reduces over ranks.
pub trait Reduce: Serialize + DeserializeOwned {
    /// Merges the next rank's value into this one.
    fn reduce(&mut self, next: Self);
}

/// Declares a struct whose fields are reduced over ranks, each by the operation before its name. `sum`, `max` and
/// `min` are for numbers, and `any` is for flags. `nested` is for a value that is [`Reduce`] itself, such as a struct
/// of this kind or a list of them.
macro_rules! reduced {
    (
        $(#[$meta:meta])*
        $visibility:vis struct $name:ident {
            $($(#[$field_meta:meta])* $operation:ident $field:ident: $type:ty,)*
        }
    ) => {
        $(#[$meta])*
        #[derive(Clone, Debug, Default, serde::Serialize, serde::Deserialize)]
        $visibility struct $name {
            $($(#[$field_meta])* pub $field: $type,)*
        }

        impl $crate::train::Reduce for $name {
            fn reduce(&mut self, next: Self) {
                $($crate::train::operations::$operation(&mut self.$field, next.$field);)*
            }
        }
    };
}
pub(crate) use reduced;

/// Declares sums that stay on the device until they are read: `struct Sums<T = f64>` with the named fields. A field
/// is an fp64 tensor on the device, and a number that is summed over ranks on the host.
macro_rules! device_sums {
    (
        $(#[$meta:meta])*
        $visibility:vis struct $name:ident {
            $($(#[$field_meta:meta])* $field:ident,)*
        }
    ) => {
        $(#[$meta])*
        #[derive(Clone, Debug, Default, serde::Serialize, serde::Deserialize)]
        $visibility struct $name<T = f64> {
            $($(#[$field_meta])* pub $field: T,)*
        }

        impl $name<tch::Tensor> {
            /// One tensor of all sums, fp64 `[fields]`, in the order of the fields.
            pub fn stack(&self) -> std::result::Result<tch::Tensor, tch::TchError> {
                tch::Tensor::f_stack(&[$(&self.$field),*], 0)
            }
        }

        impl $name {
            /// Reads the sums of [`Self::stack`], or a sum of such tensors; waits for the device.
            pub fn read(stacked: &tch::Tensor) -> std::result::Result<Self, tch::TchError> {
                let values = Vec::<f64>::try_from(stacked.f_to_device(tch::Device::Cpu)?)?;
                let mut values = values.into_iter();
                let mut next = || values.next().expect("a value for each field");
                Ok(Self { $($field: next(),)* })
            }
        }

        impl $crate::train::Reduce for $name {
            fn reduce(&mut self, next: Self) {
                $(self.$field += next.$field;)*
            }
        }
    };
}
pub(crate) use device_sums;

/// The operations of `reduced!`.
pub mod operations {
    use super::{AddAssign, Reduce};

    /// Adds.
    pub fn sum<T: AddAssign>(own: &mut T, next: T) {
        *own += next;
    }

    /// Keeps the larger value.
    pub fn max(own: &mut f64, next: f64) {
        *own = own.max(next);
    }

    /// Keeps the smaller value.
    pub fn min(own: &mut f64, next: f64) {
        *own = own.min(next);
    }

    /// True if one of the two is true.
    pub fn any(own: &mut bool, next: bool) {
        *own |= next;
    }

    /// Reduces with the field's type.
    pub fn nested<T: Reduce>(own: &mut T, next: T) {
        own.reduce(next);
    }
}

/// Reduces row by row; ranks have equal numbers of rows, and an empty list has no rows yet.
impl<T: Reduce> Reduce for Vec<T> {
    fn reduce(&mut self, next: Self) {
        if self.is_empty() {
            *self = next;
            return;
        }
        assert_eq!(self.len(), next.len(), "ranks differ in how many rows they reduce");
        self.iter_mut().zip(next).for_each(|(own, next)| own.reduce(next));
    }
}

/// Reduces over the ranks that have a value.
impl<T: Reduce> Reduce for Option<T> {
    fn reduce(&mut self, next: Self) {
        match (self.as_mut(), next) {
            (Some(own), Some(next)) => own.reduce(next),
            (None, next) => *self = next,
            (Some(_), None) => {}
        }
    }
}

/// Sums.
impl Reduce for f64 {
    fn reduce(&mut self, next: Self) {
        *self += next;
    }
}
