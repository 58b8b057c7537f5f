//! Values of each rank that become one of all ranks.

use std::ops::AddAssign;

use serde::{Serialize, de::DeserializeOwned};

/// A value that all ranks reduce to one, by [`Exchange::reduce`](super::Exchange::reduce).
pub trait Reduce: Serialize + DeserializeOwned {
    /// Takes in the next rank's value.
    fn reduce(&mut self, next: Self);
}

/// Declares a struct whose fields are reduced over ranks, each by the operation before its name: `sum`, `max`, `min`,
/// `any` of flags, or `nested` of a value that is [`Reduce`] itself, such as a struct of this kind or a list of them.
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

/// Declares sums that stay on the device until they are read: `struct Sums<T = f64>`, with a field of each name, which
/// is one fp64 tensor there, and is summed over ranks on the host.
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
            /// The sums that [`Self::stack`] made, or that such tensors add up to; waits for the device.
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

    /// Keeps the larger.
    pub fn max(own: &mut f64, next: f64) {
        *own = own.max(next);
    }

    /// Keeps the smaller.
    pub fn min(own: &mut f64, next: f64) {
        *own = own.min(next);
    }

    /// True if one of the two is.
    pub fn any(own: &mut bool, next: bool) {
        *own |= next;
    }

    /// Reduces as the field's type does.
    pub fn nested<T: Reduce>(own: &mut T, next: T) {
        own.reduce(next);
    }
}

/// Row by row; ranks have equally many, and an empty list is none yet.
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

/// The sum.
impl Reduce for f64 {
    fn reduce(&mut self, next: Self) {
        *self += next;
    }
}
