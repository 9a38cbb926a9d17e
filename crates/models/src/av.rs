//! A pair of values: one for the video stream, one for the audio stream.

/// A pair of values, one for each stream. Iteration visits video first, then audio.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash)]
pub struct Av<T> {
    /// Value of the video stream.
    pub video: T,
    /// Value of the audio stream.
    pub audio: T,
}

impl Av<&'static str> {
    /// The stream names used in program arguments and in files.
    pub const NAMES: Self = Av { video: "video", audio: "audio" };
}

impl<T> Av<T> {
    /// Creates a pair with `value` for both streams.
    pub fn both(value: T) -> Self
    where
        T: Clone,
    {
        Av { video: value.clone(), audio: value }
    }

    /// Splits a slice of alternating video and audio values by stream.
    pub fn in_turn(values: &[T]) -> Av<Vec<&T>> {
        Av { video: values.iter().step_by(2).collect(), audio: values.iter().skip(1).step_by(2).collect() }
    }

    /// Applies `f` to both values, video first.
    pub fn map<U>(self, mut f: impl FnMut(T) -> U) -> Av<U> {
        Av { video: f(self.video), audio: f(self.audio) }
    }

    /// Applies the fallible `f` to both values, video first.
    ///
    /// # Errors
    /// Returns the first error of `f`.
    pub fn try_map<U, E>(self, mut f: impl FnMut(T) -> Result<U, E>) -> Result<Av<U>, E> {
        Ok(Av { video: f(self.video)?, audio: f(self.audio)? })
    }

    /// Pairs the values of two `Av`s by stream.
    pub fn zip<U>(self, other: Av<U>) -> Av<(T, U)> {
        Av { video: (self.video, other.video), audio: (self.audio, other.audio) }
    }

    /// Borrows both values.
    pub fn as_ref(&self) -> Av<&T> {
        Av { video: &self.video, audio: &self.audio }
    }

    /// Borrows both values mutably.
    pub fn as_mut(&mut self) -> Av<&mut T> {
        Av { video: &mut self.video, audio: &mut self.audio }
    }

    /// Returns the pair with the video and audio values exchanged.
    pub fn swap(self) -> Self {
        Av { video: self.audio, audio: self.video }
    }
}

impl<T> Av<Option<T>> {
    /// Replaces each value that is present with the next item of `values`, video first. A value becomes `None` if there
    /// are no more items.
    pub fn replace_present<U>(self, values: impl IntoIterator<Item = U>) -> Av<Option<U>> {
        let mut values = values.into_iter();
        self.map(|own| own.and_then(|_| values.next()))
    }
}

impl<T> IntoIterator for Av<T> {
    type Item = T;
    type IntoIter = std::array::IntoIter<T, 2>;

    fn into_iter(self) -> Self::IntoIter {
        [self.video, self.audio].into_iter()
    }
}
