//! Divisors of numbers. A domain size divides the number of members of its level, so a candidate is a choice of one
//! divisor per level.

/// Returns every divisor of `number`, ascending. The list for 0 is empty.
pub fn divisors(number: usize) -> Vec<usize> {
    let mut low = Vec::new();
    let mut high = Vec::new();
    let mut candidate = 1;
    while candidate <= number / candidate {
        if number.is_multiple_of(candidate) {
            low.push(candidate);
            if candidate != number / candidate {
                high.push(number / candidate);
            }
        }
        candidate += 1;
    }
    low.extend(high.into_iter().rev());
    low
}

/// Returns every choice of one divisor per number, in lexicographic order. The first choice is all ones.
pub fn divisor_product(numbers: &[usize]) -> Vec<Vec<usize>> {
    numbers.iter().fold(vec![Vec::new()], |prefixes, &number| {
        let sizes = divisors(number);
        prefixes
            .iter()
            .flat_map(|prefix| {
                sizes.iter().map(move |&size| {
                    let mut choice = prefix.clone();
                    choice.push(size);
                    choice
                })
            })
            .collect()
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn divisors_are_those_found_by_trial_division() {
        for number in 0usize..500 {
            let expected: Vec<_> = (1..=number).filter(|&size| number.is_multiple_of(size)).collect();
            assert_eq!(divisors(number), expected);
        }
    }

    #[test]
    fn a_product_has_every_choice_once() {
        assert_eq!(divisor_product(&[2, 3]), [[1, 1], [1, 3], [2, 1], [2, 3]]);
        assert_eq!(divisor_product(&[2, 8, 8]).len(), 2 * 4 * 4);
        assert_eq!(divisor_product(&[]), [Vec::<usize>::new()]);
    }
}
