//! Sets of time intervals.

/// Sorted, disjoint spans `[start, end)` in picoseconds.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub(crate) struct Intervals(Vec<(i64, i64)>);

impl Intervals {
    /// Returns the union of the spans.
    pub(crate) fn union(spans: impl IntoIterator<Item = (i64, i64)>) -> Self {
        let mut spans: Vec<(i64, i64)> = spans.into_iter().filter(|(start, end)| start < end).collect();
        spans.sort_unstable();
        let mut joined: Vec<(i64, i64)> = Vec::with_capacity(spans.len());
        for (start, end) in spans {
            match joined.last_mut() {
                Some(last) if start <= last.1 => last.1 = last.1.max(end),
                _ => joined.push((start, end)),
            }
        }
        Intervals(joined)
    }

    /// Returns the total length of the spans.
    pub(crate) fn length(&self) -> i64 {
        self.0.iter().map(|(start, end)| end - start).sum()
    }

    /// Returns the smallest span that contains all spans; `None` if the set is empty.
    pub(crate) fn hull(&self) -> Option<(i64, i64)> {
        Some((self.0.first()?.0, self.0.last()?.1))
    }

    /// Returns the union with `other`.
    #[must_use]
    pub(crate) fn or(&self, other: &Intervals) -> Intervals {
        Intervals::union(self.0.iter().chain(&other.0).copied())
    }

    /// Returns the intersection with `other`.
    #[must_use]
    pub(crate) fn and(&self, other: &Intervals) -> Intervals {
        let (mut a, mut b) = (self.0.iter().peekable(), other.0.iter().peekable());
        let mut both = Vec::new();
        while let (Some(&&(a_start, a_end)), Some(&&(b_start, b_end))) = (a.peek(), b.peek()) {
            let span = (a_start.max(b_start), a_end.min(b_end));
            if span.0 < span.1 {
                both.push(span);
            }
            if a_end < b_end {
                a.next()
            } else {
                b.next()
            };
        }
        Intervals(both)
    }

    /// Returns the parts that are not in `other`.
    #[must_use]
    pub(crate) fn without(&self, other: &Intervals) -> Intervals {
        let mut left = Vec::new();
        let mut cuts = other.0.iter().peekable();
        for &(start, end) in &self.0 {
            let mut from = start;
            while let Some(&&(cut_start, cut_end)) = cuts.peek() {
                if cut_start >= end {
                    break;
                }
                if cut_end > from {
                    left.push((from, cut_start));
                    from = cut_end;
                }
                // A span of `other` that ends later may also overlap the next span.
                if cut_end > end {
                    break;
                }
                cuts.next();
            }
            left.push((from, end));
        }
        Intervals(left.into_iter().filter(|(start, end)| start < end).collect())
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    #[test]
    fn touching_spans_are_merged() {
        let all = Intervals::union([(5, 7), (0, 2), (2, 3), (6, 9), (4, 4)]);
        assert_eq!(all.0, [(0, 3), (5, 9)]);
        assert_eq!((all.length(), all.hull()), (7, Some((0, 9))));
        assert_eq!(Intervals::default().hull(), None);
    }

    #[test]
    fn set_operations_match_hand_computed_intervals() {
        let collective = Intervals::union([(10, 30), (40, 50)]);
        let work = Intervals::union([(0, 15), (25, 45)]);
        assert_eq!(collective.and(&work).0, [(10, 15), (25, 30), (40, 45)]);
        assert_eq!(collective.without(&work).0, [(15, 25), (45, 50)]);
        assert_eq!(collective.or(&work).0, [(0, 50)]);
    }

    fn spans() -> impl Strategy<Value = Vec<(i64, i64)>> {
        prop::collection::vec((0i64..40, 0i64..8).prop_map(|(start, length)| (start, start + length)), 0..12)
    }

    proptest! {
        #[test]
        fn set_operations_match_pointwise_membership(a in spans(), b in spans()) {
            let holds = |spans: &[(i64, i64)], t: i64| spans.iter().any(|(start, end)| (*start..*end).contains(&t));
            let (x, y) = (Intervals::union(a.clone()), Intervals::union(b.clone()));
            for t in 0..50 {
                let (in_a, in_b) = (holds(&a, t), holds(&b, t));
                prop_assert_eq!(holds(&x.or(&y).0, t), in_a || in_b);
                prop_assert_eq!(holds(&x.and(&y).0, t), in_a && in_b);
                prop_assert_eq!(holds(&x.without(&y).0, t), in_a && !in_b);
            }
            prop_assert_eq!(x.and(&y).length() + x.without(&y).length(), x.length());
        }
    }
}
