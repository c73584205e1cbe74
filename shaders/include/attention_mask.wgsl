// p of keys that a row does not see, those after it and those of other documents, becomes {{ unseen }}; {{ first }}: the first row
        if (n0 + {{ tile_n }}u > {{ first }} + 1u{{ " || n0 < split" if "documents" in bound }}) {
$$ for g in range(groups_n)
            let key{{ g }} = vec4u(n0 + (tn + {{ g * threads_n }}u) * 4u) + vec4u(0u, 1u, 2u, 3u);
$$ endfor
$$ for i in range(thread_m)
$$ for g in range(groups_n)
            p{{ i }}_{{ g }} = select({{ unseen }}, p{{ i }}_{{ g }}, (key{{ g }} <= vec4u(row{{ i }})){{ " & (key" ~ g ~ " >= vec4u(from" ~ i ~ "))" if "documents" in bound }});
$$ endfor
$$ endfor
        }
