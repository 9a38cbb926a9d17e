//! A value for each of the two streams.

/// A value of the video stream and one of the audio stream. Everything that goes over both takes video first.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Av<T> {
    pub video: T,
    pub audio: T,
}

impl Av<&'static str> {
    /// The streams' names in programs and files.
    pub const NAMES: Self = Av { video: "video", audio: "audio" };
}

impl<T> Av<T> {
    /// The same for both.
    pub fn both(value: T) -> Self
    where
        T: Clone,
    {
        Av { video: value.clone(), audio: value }
    }

    /// Values of video and audio by turns, as those of each stream.
    pub fn in_turn(values: &[T]) -> Av<Vec<&T>> {
        Av { video: values.iter().step_by(2).collect(), audio: values.iter().skip(1).step_by(2).collect() }
    }

    /// `f` of each.
    pub fn map<U>(self, mut f: impl FnMut(T) -> U) -> Av<U> {
        Av { video: f(self.video), audio: f(self.audio) }
    }

    /// `f` of each; the first failure where one fails.
    ///
    /// # Errors
    /// Those of `f`.
    pub fn try_map<U, E>(self, mut f: impl FnMut(T) -> Result<U, E>) -> Result<Av<U>, E> {
        Ok(Av { video: f(self.video)?, audio: f(self.audio)? })
    }

    /// Each with the other's of the same stream.
    pub fn zip<U>(self, other: Av<U>) -> Av<(T, U)> {
        Av { video: (self.video, other.video), audio: (self.audio, other.audio) }
    }

    /// References to each.
    pub fn as_ref(&self) -> Av<&T> {
        Av { video: &self.video, audio: &self.audio }
    }

    /// References to each, to change them.
    pub fn as_mut(&mut self) -> Av<&mut T> {
        Av { video: &mut self.video, audio: &mut self.audio }
    }

    /// Each stream's value in the other's place.
    pub fn swap(self) -> Self {
        Av { video: self.audio, audio: self.video }
    }
}

impl<T> Av<Option<T>> {
    /// Values in turn, one for each stream that is there.
    pub fn in_place_of<U>(self, values: impl IntoIterator<Item = U>) -> Av<Option<U>> {
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
